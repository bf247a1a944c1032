"""check(fn, op): draw recipes, run every property on each, shrink what fails, report."""

import itertools
import math
import random
import time
from dataclasses import dataclass, field
from functools import partial

import hypothesis

from ringtide.testing import attention, gla
from ringtide.testing.cases import FEATURES, MASKS, RECIPES, deal, parse, simpler, strategy, turns
from ringtide.testing.run import keywords_missing, runner, stepper

NEAR = 0.5  # error over bound of the naive computation: from there on hypothesis steers, which costs variety
CASES_A_SHAPE = 20  # recipes that share a compiled shape: compiling is what takes the time


@dataclass(frozen=True)
class Failure:
    """A property that does not hold: for which recipe, and what was seen (the slices around the worst element)."""

    case: object
    property: str
    message: str

    def __str__(self):
        return f"{self.property}: {self.message}\n{self.case}"


@dataclass
class Report:
    """What `check` found. True if something was tested and nothing failed, so that `assert check(fn, op)` is a test.

    cases          recipes run            refused      of these, refused by NotImplementedError
    failed         recipes that failed    failure      the first of them, shrunk
    worst          largest error over bound among claims that have one     worst_case     where
    interrupted    by Ctrl-C: the rest is what ran until then; not true, whatever it is
    """

    op: str
    cases: int = 0
    refused: int = 0
    failed: int = 0
    failure: Failure | None = None
    worst: float = 0.0
    worst_case: object = None
    seconds: float = 0.0
    interrupted: bool = False
    refusals: dict = field(default_factory=dict)  # message -> count

    @property
    def ok(self) -> bool:
        return self.cases > self.refused and not self.failed and not self.interrupted

    def __bool__(self):
        return self.ok

    def __str__(self):
        lines = [f"{self.op}: {self.cases} cases, {self.failed} failed, {self.refused} refused, {self.seconds:.0f} s"]
        if self.interrupted:
            lines.append("interrupted: this is what ran until then")
        lines += [f"refused {count} times: {message}" for message, count in self.refusals.items()]
        if self.worst_case is not None:
            lines.append(f"worst error / bound {self.worst:.3g} at {self.worst_case}")
        if self.failure:
            lines.append(f"FAILED {self.failure}")
        return "\n".join(lines)

    __repr__ = __str__


def check(
    fn,
    op: str,
    *,
    cases: int = 100,
    seed: int = 0,
    minutes: float | None = None,
    replay: str | None = None,
    without=(),
    masks=None,
    dtypes=None,
    gradients: bool = True,
    decode_step=None,
    block: int | None = None,
    relative: dict | None = None,
    framework: str = "jax",
    stop_early: bool = False,
    shrink: float = 45,
    progress=None,
) -> Report:
    """Fuzzes `fn` against the float64 reference: `assert ringtide.testing.check(my_attention, "attention")`.

    fn            has the signature of `ringtide.attention` or `ringtide.gla`; a function of JAX arrays (or tensors, see
                  framework), or with gradients=False any function of NumPy arrays. It is never given a keyword that it
                  does not take, nor None
    op            "attention" or "gla"
    cases, seed   how many recipes; the same seed draws the same ones.  minutes: keep drawing for so long instead
    replay        one recipe, as a failure prints it: only this is run
    without       features that fn does not have, of: {features}
    masks         texts of the masks to draw, of `ringtide.testing.MASKS`; ("Causal()",) for a causal function
    dtypes        of float32, bfloat16, float16
    decode_step   a function as `ringtide.gla_decode_step`: it must agree with the whole
    block         the tile length of fn, around which lengths are drawn (128 for attention, 64 for gla)
    relative      for gla, {{dtype: {{result: error}}}}: the largest relative error in the Frobenius norm of o, hT, dq,
                  dk, dv, dg, dh0 that is allowed beside the usual bounds
    framework     "jax" or "torch": what fn and decode_step compute with
    stop_early    stop at the first failure
    shrink        seconds to spend on a plainer recipe that fails too
    progress      progress(report) is called after each recipe

    Returns a Report, after Ctrl-C too. A NotImplementedError of fn counts as a refusal, any other exception as a
    failure. Raises ValueError for arguments that name nothing known.
    """
    if not isinstance(cases, int) or cases < 1:
        raise ValueError(f"cases: expected an int of at least 1, got {cases!r}")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes: expected a positive number, got {minutes!r}")
    if framework not in ("jax", "torch"):
        raise ValueError(f"framework: expected 'jax' or 'torch', got {framework!r}")
    fresh = partial(_trials, fn, op, without, gradients, decode_step, relative, framework)  # nothing compiled yet
    trial = fresh()
    masks = _known("masks", masks, MASKS)
    dtypes = _known("dtypes", dtypes, RECIPES[op].choices["dtype"])
    without = {*without, *keywords_missing(fn, op)}
    if "mask" in without:
        masks = ("none",)
    report, start = Report(op), time.monotonic()
    if replay is not None:
        case = parse(replay)
        if not isinstance(case, RECIPES[op]):
            raise ValueError(f"replay: {type(case).__name__} is not a recipe of {op}")
    deadline = None if minutes is None else start + 60 * minutes
    over = partial(_over, report, deadline, cases, stop_early)
    limits = {"without": without, "masks": masks, "dtypes": dtypes, "block": block}
    try:
        if replay is not None:
            _examine(case, trial, report)
        else:
            _draw(cases if deadline is None else 200, seed, limits, fresh, report, over, progress)
            if report.failure:
                report.failure = _shrink(report.failure, trial, shrink)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.monotonic() - start
    return report


check.__doc__ = check.__doc__.format(features="; ".join(f"{op}: {', '.join(names)}" for op, names in FEATURES.items()))


def _known(name, values, known):
    if values is not None and not len(values):
        raise ValueError(f"{name}: expected at least one of {', '.join(known)}")
    for value in values or ():
        if value not in known:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")
    return values


def _over(report, deadline, cases, stop_early):
    enough = report.cases >= cases if deadline is None else time.monotonic() > deadline
    return enough or bool(stop_early and report.failed)


def _trials(fn, op, without, gradients, decode_step, relative, framework):
    """A function from a recipe to its Trial, and the properties to check on it."""
    if op not in RECIPES:
        raise ValueError(f"op: expected one of {', '.join(RECIPES)}, got {op!r}")
    for name in without:
        if name not in FEATURES[op]:
            raise ValueError(f"without: {op} has no feature {name!r}; it has {', '.join(FEATURES[op])}")
    if op != "gla" and relative:
        raise ValueError("relative: for gla only")
    if op == "attention":
        return partial(attention.Trial, run=runner(attention.apply(fn), gradients, framework)), attention.PROPERTIES
    final_state = "final_state" not in {*without, *keywords_missing(fn, op)}
    run = runner(gla.apply(fn, final_state), gradients, framework)
    decode = decode_step and stepper(decode_step, framework)
    options = {"decode": decode, "final_state": final_state, "relative": relative}
    return partial(gla.Trial, run=run, **options), gla.PROPERTIES


def _draw(count, seed, limits, fresh, report, over, progress):
    """Rounds of `count` recipes, each with shapes of its own, until it is over."""
    for number in itertools.count():
        pool = deal(report.op, max(count // CASES_A_SHAPE, 6), f"{seed} {number}", **limits)
        _round(pool, count, f"{seed} {number}", fresh(), report, over, progress)
        if over():
            return
        limits = {**limits, "without": {*limits["without"], "empty"}}  # once is enough


def _round(pool, count, seed, trial, report, over, progress):
    """Runs `count` recipes of the pool. hypothesis draws their data: it steers to where errors come close to bounds."""
    for static, turn in turns(pool, count).items():
        rng = random.Random(f"{seed} {static}")

        @hypothesis.seed(rng.random())
        @hypothesis.settings(
            max_examples=turn,
            database=None,
            derandomize=False,
            deadline=None,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.target],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy([static], rng))
        def draw(case):
            if over():
                return
            worst = _examine(case, trial, report)
            if NEAR < worst <= 1:  # what fails needs no more of its kind
                hypothesis.target(worst)
            if progress:
                progress(report)

        draw()


def _examine(case, trial, report) -> float:
    """Runs every property on one recipe and enters the outcome. Returns the largest error over bound."""
    try:
        failure, worst = _judge(case, *trial)
    except NotImplementedError as refusal:
        report.cases, report.refused = report.cases + 1, report.refused + 1
        report.refusals[str(refusal)] = report.refusals.get(str(refusal), 0) + 1
        return 0.0
    report.cases += 1
    if report.worst_case is None or worst > report.worst:
        report.worst, report.worst_case = worst, case
    if failure:
        report.failed += 1
        report.failure = report.failure or failure
    return worst


def _judge(case, make_trial, properties):
    """(the first Failure or None, the largest error over bound)."""
    worst, name = 0.0, "arrays"
    try:
        trial = make_trial(case)
        for name, claims in ((p.__name__, p(trial)) for p in properties):
            for claim in claims:
                ratio = claim.ratio()
                worst = max(worst, ratio)
                if ratio > 1:
                    return Failure(case, name, str(claim)), worst
    except NotImplementedError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"raised {type(error).__name__}: "
        return Failure(case, name, kind + str(error)), float("inf")
    return None, worst


def _shrink(failure, trial, seconds):
    """A failure of the same property for a recipe as plain as can be found in the time."""
    deadline, tried = time.monotonic() + seconds, {failure.case}
    found = True
    while found:
        found = False
        for case in simpler(failure.case):
            if time.monotonic() > deadline:
                return failure
            if case in tried:
                continue
            tried.add(case)
            try:
                other, _ = _judge(case, *trial)
            except NotImplementedError:
                continue
            if other and other.property == failure.property:
                failure, found = other, True
                break
    return failure
