"""What a training run will need and take on a pod that is not there: memory by the compiler, time by its schedule.

The real training step is compiled for the pod's topology. From the compiler: bytes of HBM a device, bytes kept on the
host, what every device sends and how often each kernel runs. The time of a step is predicted as a sum of terms:

    attention forward, backward   cycles of the kernels' schedule (splash.py) over the tiles that each hop visits, times
                                  the calibration of the chip; or their traffic of HBM, if that takes longer
    matmuls                       2 FLOP a parameter and token, a pass forward, two backward, and one more where the
                                  layers are computed again, at MATMUL of the peak over the calibration
    elementwise                   the compiler's own estimate of everything else (copies, norms, the merge of hops)
    interconnect                  bytes over the published rate of the links: of a ring's hop what outlasts its kernel;
                                  of gathers, scatters and all-to-alls, all of it: none is assumed to hide
    host                          bytes to and from the host over HOST_RATE: what outlasts the layers

MFU = (6 x parameters x T + 6 L T^2 N H) / step / peak: recomputation does not count as work done.
"""

import dataclasses
import functools
import math
import re

from ringtide.bench import splash
from ringtide.bench.case import Case
from ringtide.bench.chips import CHIPS, HOST_RATE
from ringtide.bench.compile import CompileError, ask
from ringtide.kernels import layouts
from ringtide.models import BadInput, llama, sharding

MATMUL = 0.9  # share of the peak that large matrix products are taken to reach, before calibration
REMATS = "none", "attention", "offload", "offload-all", "full"  # the least that is done twice first
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Pod:
    """A slice of TPUs: chip as in CHIPS, topology as Google names it, "4x4x4" chips."""

    chip: str
    topology: str

    def __post_init__(self):
        if not re.fullmatch(r"[1-9]\d{0,2}(x[1-9]\d{0,2}){1,2}", self.topology):
            raise BadInput(f"--topology {self.topology}: expected chips along two or three axes, as 4x4x4")

    @property
    def name(self) -> str:
        """As libtpu knows it."""
        return f"{self.chip}:{self.topology}"

    @property
    def devices(self) -> int:
        a_chip = 2 if self.chip == "tpu7x" else 1
        return math.prod(map(int, self.topology.split("x"))) * a_chip


def meshes(pod: Pod, config: llama.Config) -> dict[str, dict]:
    """{strategy: mesh axes} with one sequence over the whole pod; usp's ulysses shares the kv heads out evenly."""
    heads = math.gcd(pod.devices, config.kv_heads)
    whole = {"context": pod.devices}
    return {
        "ring": whole,
        "usp": {"ulysses": heads, "context": pod.devices // heads},
        "ulysses": whole,
        "all_gather": whole,
    }


def plan(
    pod: Pod, preset: str, tokens: int, parallel: sharding.Parallel, batch=1, remats=REMATS, log=lambda line: None
):
    """The row of one strategy, with the first of the policies `remats` that fits (if none does, the last).

    Raises CompileError where the step does not compile for another reason than memory, models.BadInput for lengths and
    batches that the mesh does not divide.
    """
    config = llama.PRESETS[preset]
    for remat in remats:
        chosen = dataclasses.replace(parallel, remat=remat)
        if remat != remats[-1] and _at_least(config, tokens, batch, chosen) > CHIPS[pod.chip].memory * GIB:
            log(f"{parallel.strategy}, remat {remat}: surely too large, not compiled")
            continue
        spec = {"preset": preset, "tokens": tokens, "batch": batch, "parallel": dataclasses.asdict(chosen)}
        step = ask("ringtide.bench.plan:compile_step", {"pod": dataclasses.asdict(pod), **spec})
        fits = step["hbm_bytes"] <= step["hbm_limit"] and step["host_bytes"] <= step["host_limit"]
        log(f"{parallel.strategy}, remat {remat}: {step['hbm_bytes'] / GIB:.1f} GiB a device, "
            f"{step['host_bytes'] / GIB:.1f} GiB on the host{'' if fits else ': does not fit'}")  # fmt: skip
        if fits:
            break
    row = {
        "strategy": parallel.strategy,
        "tokens": tokens,
        "fits": fits,
        **{name: step[name] for name in ("hbm_bytes", "hbm_limit", "host_bytes", "host_limit")},
        **dict.fromkeys(("step_s", "tokens_per_s", "mfu", "terms")),
        "remat": remat,
        "mesh": {axis: getattr(parallel, axis) for axis in sharding.AXES},
    }
    if not fits and "collectives" not in step:  # the compiler gave up: there is no program to price
        return row
    terms = predict(pod, config, tokens, batch, chosen, step)
    seconds = sum(terms.values())
    work = batch * flops(config, tokens)
    return row | {
        "step_s": seconds,
        "tokens_per_s": batch * tokens / seconds,
        "mfu": work / seconds / (CHIPS[pod.chip].peak * pod.devices),
        "terms": terms,
        "sent_bytes": step["collectives"],
        "compile_s": step["compile_s"],
    }


def longest(pod, preset, parallel, batch=1, remats=REMATS, log=lambda line: None):
    """The row of the longest sequence that fits, to 1/32 of itself, by bisection over compiles."""
    unit = 2048 * parallel.shards
    fitting, row, low, high = None, None, 0, None
    count = 8
    while high is None or high - low > max(1, low // 32):
        row = plan(pod, preset, count * unit, parallel, batch, remats, log)
        log(f"{count * unit:,} tokens: {'fits' if row['fits'] else 'does not fit'}")
        if row["fits"]:
            fitting, low = row, count
            remats = remats[remats.index(row["remat"]) :]  # what did not fit will not fit a longer one
        else:
            high = count
        count = 2 * low if high is None else (low + high) // 2
        if count == 0:
            break
    return fitting or row


def check(pod, tokens, batch, parallel):
    """Raises models.BadInput, one line, for what the mesh cannot hold; tokens: None if they are to be found."""
    if parallel.devices != pod.devices:
        raise BadInput(f"--mesh: holds {parallel.devices} devices, {pod.name} has {pod.devices}")
    if batch % parallel.batch:
        raise BadInput(f"--batch {batch}: must be a multiple of {parallel.batch}, data x fsdp of the mesh")
    try:
        layouts.check_length(parallel.layout, tokens or 0, parallel.shards)
    except ValueError as error:
        raise BadInput(f"--tokens: {error}") from None


def heading(pod, preset, config, batch) -> str:
    chip = CHIPS[pod.chip]
    return (
        f"{preset}, {parameters(config) / 1e9:.2f} B parameters, batch {batch}, on {pod.name}: {pod.devices} devices "
        f"of {chip.memory:.2f} GiB and {chip.peak / 1e12:,.0f} TFLOP/s\n"
        f"memory: by the compiler. time: predicted; matmuls at {MATMUL / chip.calibration:.0%} of peak, links "
        f"{chip.link / 1e9:.0f} GB/s each way, host {HOST_RATE / 1e9:.0f} GB/s, kernels' schedule x {chip.calibration}"
    )


def lines(row) -> str:
    mesh = ", ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
    text = (
        f"{row['strategy']:<11}{row['tokens']:>12,} tokens  {'fits' if row['fits'] else 'DOES NOT FIT':<13}"
        f"HBM {row['hbm_bytes'] / GIB:6.1f} of {row['hbm_limit'] / GIB:.1f} GiB  "
        f"host {row['host_bytes'] / GIB:5.1f} of {row['host_limit'] / GIB:.1f} GiB  remat {row['remat']}, {mesh}"
    )
    if row["terms"]:
        terms = ", ".join(f"{name} {seconds:.3g}" for name, seconds in row["terms"].items())
        speed = f"step {row['step_s']:.4g} s  {row['tokens_per_s']:,.0f} tokens/s  MFU {row['mfu']:.1%}"
        text += f"\n{'':<11}{speed}\n{'':<11}seconds of it: {terms}"
    return text


def parameters(config) -> int:
    return sum(math.prod(shape) for shape in _leaves(llama.shapes(config)))


def flops(config, tokens) -> float:
    """Of a step of one sequence, forward and backward, causal attention counted by half, nothing computed again."""
    return 6 * parameters(config) * tokens + 6 * config.layers * tokens**2 * config.heads * config.head_dim


def predict(pod, config, tokens, batch, parallel, step) -> dict[str, float]:
    """{term: seconds} of a step; step: what `compile_step` says of it."""
    chip = CHIPS[pod.chip]
    rows = batch // parallel.batch  # sequences that a device has a part of
    hops = {pass_: attention(pod, config, tokens, parallel, pass_) for pass_ in ("forward", "backward")}
    ran = lambda name: step["kernels"].get(name, 0) / config.layers
    again = ran("splash_forward") / len(hops["forward"]) + ran("ring_forward")
    runs = {"forward": round(again) if again >= 1 else 1, "backward": 1}
    layers = rows * config.layers
    terms = {f"attention {p}": layers * runs[p] * sum(hops[p]) for p in hops}
    passes = 3 + (parallel.remat != "none")
    products = 2 * passes * parameters(config) * batch * tokens / pod.devices
    terms["matmuls"] = products / (chip.peak * MATMUL / chip.calibration)
    terms["elementwise"] = step["cycles"]["rest"] / (chip.ghz * 1e9) * chip.calibration
    sent = dict(step["collectives"])
    case, _ = calls_of(pod.chip, config, tokens, parallel, "forward")
    held = tokens // parallel.context if parallel.strategy == "usp" else tokens // parallel.shards
    keys = rows * held * 2 * case.kv_heads * config.head_dim  # and values: elements that travel
    inside = (parallel.context - 1) * 2 * keys * (ran("ring_forward") + ran("ring_backward"))
    inside += parallel.context * 4 * keys * ran("ring_backward")  # their gradients in float32, and home
    permuted = (sent.pop("collective-permute", 0) + config.layers * inside) * step["load"] / chip.link
    kernels = terms["attention forward"] + terms["attention backward"]
    apart = sent.pop("all-to-all", 0) * step["distance"] / (chip.link * chip.links)
    terms["interconnect"] = max(0.0, permuted - kernels) + apart + sum(sent.values()) / (chip.link * chip.links)
    moved = 2 * step["host_bytes"] / HOST_RATE
    terms["host"] = max(0.0, moved - sum(terms.values()))
    return terms


def attention(pod, config, tokens, parallel, pass_) -> list[float]:
    """Seconds of each call of the kernel in one layer's pass, on the device that it takes longest on."""
    chip = CHIPS[pod.chip]
    case, calls = calls_of(pod.chip, config, tokens, parallel, pass_)
    cost = _cost(case)
    rows, keys, *_ = cost.facts["config"]["blocks"]
    cores = chip.cores if cost.kernel.split else 1
    seconds = []
    for q_at, k_at in calls:
        counts = _visits(case, q_at, k_at, tuple(cost.facts["sizes"].items()))
        counts = {name: n * cost.facts["stacks"] for name, n in counts.items()}
        cycles = cost.cycles(counts) / cores / (chip.ghz * 1e9) * chip.calibration
        traffic = splash.bytes_of(case, counts, rows, keys, cost.facts["config"].get("fold", False))
        seconds.append(max(cycles, traffic / chip.hbm))
    return seconds


@dataclasses.dataclass(frozen=True)
class Part:
    """Positions of the tokens that a call sees: `held` shards of a layout, `first`, `first` + `stride` and so on."""

    tokens: int
    layout: str
    shards: int
    first: int
    stride: int = 1
    held: int = 1

    @property
    def count(self):
        return self.tokens // self.shards * self.held

    def position(self, index):
        local = self.tokens // self.shards
        at = (self.first + index // local * self.stride) * local + index % local
        return layouts.position_of(at, self.layout, self.tokens, self.shards)

    block = splash.Tokens.block


def calls_of(chip, config, tokens, parallel, pass_):
    """(Case of a device's call, [(queries, keys) of each call of a layer]).

    In zigzag all shards before a device's own cost it the same, and so do all after it; so one device, in the middle,
    stands for all.
    """
    whole = functools.partial(Part, tokens, parallel.layout, parallel.shards)
    heads, kv_heads = config.heads, config.kv_heads
    ring = parallel.shards
    if parallel.strategy in ("ulysses", "usp"):
        from ringtide.kernels.context.ulysses import heads_over

        ring = parallel.context if parallel.strategy == "usp" else 1
        laid = heads_over(heads, kv_heads, parallel.shards // ring)
        width = parallel.shards // ring
        heads, kv_heads = laid.kv_heads * laid.group // width, laid.kv_heads * laid.copies // width
    held = parallel.shards // ring  # shards that a call has the queries of
    member = lambda r: whole(r, ring, held)
    if parallel.strategy == "all_gather":
        calls = [(whole(ring // 2), whole(0, 1, ring))]
    else:
        middle = ring // 2
        calls = [(member(middle), member((middle - hop) % ring)) for hop in range(ring)]
    case = Case(chip, pass_, config.head_dim, heads, kv_heads, 16384, "causal", given=True)
    return case, calls


@functools.cache
def _cost(case):
    return splash.cost(case)


@functools.cache
def _some_visits(case, sizes, q_at, k_at):
    return splash.visits(case, **dict(sizes), q_at=q_at, k_at=k_at)


def _visits(case, q_at, k_at, sizes):
    """`splash.visits`, found once for the hops that are alike: keys all before, all after, or the queries' own."""
    if (q_at.layout, q_at.held) == ("zigzag", k_at.held) and k_at.first != q_at.first:
        k_at = dataclasses.replace(k_at, first=q_at.first + (1 if k_at.first > q_at.first else -1))
    return _some_visits(case, sizes, q_at, k_at)


def _at_least(config, tokens, batch, parallel):
    """Bytes of activations that a policy keeps on a device, the least: there is no need to compile what cannot fit."""
    a_token = 2 * batch * tokens * config.layers / parallel.devices
    width, attended = config.dim, config.heads * config.head_dim
    kept = {
        "none": 2 * width + 2 * attended + 3 * config.ff_dim,
        "attention": width + attended,
        "offload": width,
        "full": width,
        "offload-all": 0,
    }
    return a_token * kept[parallel.remat]


def compile_step(pod, preset, tokens, batch, parallel):
    """In a process of its own: the training step, compiled for the pod. Returns what the compiler says of it."""
    import time

    import jax
    from jax.experimental import topologies

    from ringtide.bench.hlo import Program
    from ringtide.models import train

    pod, parallel = Pod(**pod), sharding.Parallel(**parallel)
    chip = CHIPS[pod.chip]
    facts = {"hbm_limit": round(chip.memory * GIB), "host_limit": round(chip.host), "host_bytes": 0}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=pod.name).devices
    except jax.errors.JaxRuntimeError as error:
        raise CompileError(f"--topology {pod.topology}: {' '.join(str(error).split())[:300]}") from None
    mesh = sharding.make_mesh(parallel, devices)
    settings = train.Settings(preset=preset, seq=tokens, batch=batch, dtype="bfloat16")
    trainer = train.Trainer(llama.PRESETS[preset], settings, parallel, mesh)
    start = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = trainer.train_step.lower(trainer.like(), *trainer.batch_like()).compile()
    except jax.errors.JaxRuntimeError as error:
        if not (needed := _exhausted(str(error))):
            raise CompileError(" ".join(str(error).split())[:400]) from None
        return facts | {"hbm_bytes": needed}
    memory, program = compiled.memory_analysis(), Program(compiled.as_text())
    return facts | {
        "hbm_bytes": memory.peak_memory_in_bytes,
        "host_bytes": memory.host_temp_size_in_bytes,
        "collectives": program.collectives(),
        "kernels": program.kernels(),
        "cycles": program.cycles(),
        "load": _load(mesh, parallel),
        "distance": _distance(pod),
        "compile_s": time.perf_counter() - start,
    }


def _exhausted(message):
    """Bytes of HBM that a program would need, from the compiler's refusal; None if that has another reason."""
    found = re.search(r"\(([\d.]+)([MGT])\) exceeds available HBM|Used ([\d.]+)([MGT]) of [\d.]+[MGT] hbm", message)
    if not found:
        return None
    number, unit = filter(None, found.groups())
    return round(float(number) * {"M": 1 << 20, "G": GIB, "T": 1 << 40}[unit])


def _load(mesh, parallel):
    """How many of the messages of a ring's hop share the busiest link, each routed dimension by dimension."""
    devices = mesh.devices.reshape(-1, parallel.context)
    sizes = [1 + max(device.coords[i] for device in mesh.devices.flat) for i in range(3)]
    links = {}
    for ring in devices:
        for a, b in zip(ring, [*ring[1:], ring[0]], strict=True):
            at = list(a.coords)
            for axis, size in enumerate(sizes):
                wraps = size >= 4
                while at[axis] != b.coords[axis]:
                    ahead = (b.coords[axis] - at[axis]) % size
                    step = 1 if (ahead <= size // 2 if wraps else b.coords[axis] > at[axis]) else -1
                    link = (*at, axis, step)
                    links[link] = links.get(link, 0) + 1
                    at[axis] = (at[axis] + step) % size
    return max(links.values(), default=1)


def _distance(pod):
    """Links between two chips of the pod, the mean over all pairs, on a torus where a side has 4 or more."""
    total = 0.0
    for size in map(int, pod.topology.split("x")):
        lengths = [min(i, size - i) if size >= 4 else i for i in range(size)]
        total += sum(lengths) / size if size >= 4 else (size * size - 1) / (3 * size)
    return max(total, 1.0)


def _leaves(tree):
    return [tree] if isinstance(tree, tuple) else [leaf for child in tree.values() for leaf in _leaves(child)]
