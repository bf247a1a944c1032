"""What training and generating with a Laplace would take on Trainium2: every term by itself, predicted.

A rank is a logical core of two NeuronCores, 4 a chip. The mesh's axes data and fsdp split the batch, context the
sequences; FSDP2 shards the weights over fsdp, gradients go to owners and weights come back as models/muon.py says. The
terms of a step:

    matmuls         parameters x rows over the tensor engine's rate, or their bytes over HBM's if that takes longer
    GLA kernels     the simulator's time a unit (bench/trainium.py) x units: T_sched; the range is T_max to T_sum
    elementwise     bytes that norms, convolutions, gates and residuals move, each fused group once
    head and loss   each logit computed once, with its gradients
    optimizer       of the rank with most to do: Newton-Schulz of the matrices that it owns, bytes of all it owns
    gradients       float32, to their owners: nothing hides them; weights bf16 back, the same
    FSDP            gathers and scatters: what outlasts the layers
    context         states that pass from rank to rank: their matmul, in float32, and the gathers

In decoding each rank has a copy of the weights and its share of the sequences, as a pool a rank serves them. MFU counts
6 FLOP a token and parameter but the embedding's, and the recurrence, 12 K V a head and layer: recomputation is no work.
"""

import dataclasses
import functools
import math

from ringtide.bench.trainium import ASSUMED, PUBLISHED, SCENARIOS, Rates, decode_kernel, kernels, ranks
from ringtide.models import BadInput
from ringtide.models.ranks import AXES, REMAT

C = 128  # tokens of a chunk of the kernels
STATE = 42  # bytes of traffic a parameter that its owner updates: gradient, clipped, moments, master, weight


@dataclasses.dataclass(frozen=True)
class Setup:
    """preset of models.laplace; seq tokens x batch sequences a training step on `mesh`; `sequences` decoded at once."""

    preset: str
    instances: int = 1
    seq: int = 4096
    batch: int = 128
    mesh: tuple = ()  # (("data", 16), ("fsdp", 4)); empty: the weights over a chip, the batch over as many as it can
    sequences: int = 1280

    @functools.cached_property
    def config(self):
        from ringtide.models import laplace

        return laplace.PRESETS[self.preset]

    @functools.cached_property
    def shapes(self) -> dict[str, tuple]:
        """{name: shape} of all parameters."""
        import torch

        from ringtide.models import laplace

        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in laplace.LaplaceForCausalLM(self.config).named_parameters()}

    @functools.cached_property
    def axes(self) -> dict[str, int]:
        """data, fsdp, context; their product is the number of ranks."""
        if self.mesh:
            return dict.fromkeys(AXES, 1) | dict(self.mesh)
        there = ranks(self.instances)
        fsdp = math.gcd(_chip(), self.batch)
        data = math.gcd(there // fsdp, self.batch // fsdp)
        return {"data": data, "fsdp": fsdp, "context": there // fsdp // data}

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def of_layers(self) -> int:
        """Parameters of the layers' matrices."""
        return sum(math.prod(s) for name, s in self.shapes.items() if ".layers." in name and len(s) == 2)

    @property
    def of_head(self) -> int:
        return self.config.dim * self.config.vocab_size

    @property
    def tokens(self) -> int:
        """Of a training step, on a rank."""
        return self.seq * self.batch // ranks(self.instances)

    @property
    def rows(self) -> int:
        """Sequences that a rank decodes, the fullest one."""
        return -(-self.sequences // ranks(self.instances))

    @property
    def state_bytes(self) -> int:
        from ringtide.models import laplace

        return laplace.state_bytes(self.config)


def check(setup: Setup) -> None:
    """Raises BadInput, one line, for what the mesh or the kernels cannot hold."""
    there, axes, c = ranks(setup.instances), setup.axes, setup.config
    if (size := math.prod(axes.values())) != there:
        raise BadInput(f"--mesh: holds {size} ranks, {setup.instances} x trn2.48xlarge have {there} logical cores")
    if setup.batch % (rows := axes["data"] * axes["fsdp"]):
        raise BadInput(f"--batch {setup.batch}: must be a multiple of {rows}, data x fsdp of the mesh")
    if setup.seq % axes["context"]:
        raise BadInput(f"--tokens {setup.seq}: must be a multiple of {axes['context']}, context of the mesh")
    if c.key_dim > 128 or c.value_dim > 256 or c.heads % Rates().cores:
        raise BadInput(f"PRESET {setup.preset}: heads of {c.key_dim}/{c.value_dim} x {c.heads} are not priced")


def flops(setup) -> float:
    """Of a token, forward and backward."""
    c = setup.config
    embedding = 0 if c.tied else setup.of_head
    return 6 * (setup.parameters - embedding) + 12 * c.layers * c.heads * c.key_dim * c.value_dim


def elementwise(config) -> dict[str, float]:
    """Bytes a token and layer, forward and backward: what each fused group reads and writes, bf16, gates float32."""
    c, E, k, o = config, sum(config.widths), config.widths[1], config.heads * config.value_dim
    # norm 2 D; convolution 2 E; gates 3 k; norm and gate of o 3 o; residual and norm 4 D; silu(.) . 3 F; residual 3 D
    forward = 9 * c.dim + 2 * E + 3 * k + 3 * o + 3 * c.ff_dim
    # norms with their residuals 8 D; the sums over products that share an input 15 D; the others' inputs and gradients
    backward = 23 * c.dim + 3 * E + 4 * k + 5 * o + 5 * c.ff_dim
    return {"forward": 2 * forward, "backward": 2 * backward}


def kept(config) -> int:
    """Bytes a token and layer that the backward pass needs of the forward one."""
    c, E, k, o = config, sum(config.widths), config.widths[1], config.heads * config.value_dim
    return 2 * (4 * c.dim + 3 * E + 3 * k + 16 + 3 * o + 3 * c.ff_dim)


def train(setup: Setup, rates: Rates, remat: str) -> tuple[dict, dict]:
    """({term: seconds} of a step, {term: seconds that hide behind the layers})."""
    c, t, fsdp, part = setup.config, setup.tokens, setup.axes["fsdp"], setup.seq // setup.axes["context"]
    gla = kernels(c.heads // rates.cores, c.key_dim, c.value_dim)
    units = c.layers * c.heads / rates.cores * -(-part // C) * (t // part)
    moved = {pass_: c.layers * t * n / rates.traffic for pass_, n in elementwise(c).items()}
    product = rates.matmul(setup.of_layers, t)
    forward = {"matmuls": product, "GLA kernel": units * rates.kernel(gla["forward"]), "elementwise": moved["forward"]}
    backward = {
        "matmuls": 2 * product,
        "GLA kernel": units * rates.kernel(gla["backward"]),
        "elementwise": moved["backward"],
    }
    terms = {f"{name}, forward": s for name, s in forward.items()}
    terms |= {f"{name}, backward": s for name, s in backward.items()}
    if remat == "full":
        terms["layers forward again"] = sum(forward.values())
    if setup.axes["context"] > 1:
        terms["context"] = context(setup, rates, again=remat == "full")
    layers = sum(terms.values())
    # Logits float32: written, summed up, turned into their gradients, which two products read; embeddings and back.
    logits = t * (c.vocab_size * (4 + 4 + 4 + 2 + 2 * 2) + c.dim * 2 * 4)
    terms["embedding, head and loss"] = 3 * rates.matmul(setup.of_head, t) + logits / rates.traffic
    terms |= optimizer(setup, rates)
    terms |= exchanges(setup, rates)
    size = 8 * setup.parameters if fsdp > 1 else 0  # weights forward and backward, gradients in float32
    near = _together(setup)
    sent = _chip() / near * size * (1 - near / fsdp)  # to a chip, from others
    sharded = max(2 * size / rates.traffic, sent / rates.link)  # read and written by a rank
    terms["FSDP"] = max(0.0, sharded - layers)
    terms["launches"] = (2 * c.layers + 3) * rates.of("launch")  # FSDP2 wraps each block: a program a block and pass
    return terms, {"FSDP": sharded - terms["FSDP"]}


def context(setup, rates, again) -> float:
    """As bindings/torch/context_parallel.py: one more product, k^T v; K V + K float32 a head from each rank to all."""
    c, axes = setup.config, setup.axes
    runs = c.layers * (3 + again)  # backward there are two products, and one exchange
    product = rates.flops(4 * 2 * setup.tokens * c.heads * c.key_dim * c.value_dim)  # float32: four passes
    sequences = setup.batch // axes["data"] // axes["fsdp"]
    size = axes["context"] * sequences * c.heads * c.key_dim * (c.value_dim + 1) * 4
    exchange = 2 * rates.of("collective") + _chip() * size / rates.link  # with that of the convolution's tokens
    return runs * product + (runs - c.layers) * exchange


def _chip():
    """Ranks of a chip."""
    return round(1 / Rates().share)


def _together(setup):
    """Ranks of a chip that shard the same weights: ranks of one context are next to each other, then those of fsdp."""
    return min(setup.axes["fsdp"], max(1, _chip() // setup.axes["context"]))


@functools.cache
def owned(setup: Setup) -> list[list[str]]:
    """Names of the parameters that each rank updates, as models/muon.py shares them out."""
    from ringtide.models import muon

    costs = {name: muon.cost(shape, muon.is_matrix(name, shape)) for name, shape in setup.shapes.items()}
    names = [[] for _ in range(ranks(setup.instances))]
    for name, owner in muon.balance(costs, len(names)).items():
        names[owner].append(name)
    return names


def newton_schulz(shape) -> float:
    """FLOP of torch.optim.Muon's five rounds."""
    a, b = sorted(shape)
    return 5 * (4 * a * a * b + 2 * a**3)


def optimizer(setup, rates) -> dict[str, float]:
    """Of the rank with most to do."""
    from ringtide.models import muon

    def of(names):
        shapes = {name: setup.shapes[name] for name in names}
        rounds = sum(newton_schulz(s) for name, s in shapes.items() if muon.is_matrix(name, s))
        return rates.flops(rounds), STATE * sum(map(math.prod, shapes.values())) / rates.traffic

    rounds, moved = max(map(of, owned(setup)), key=sum)
    return {"Muon: Newton-Schulz": rounds, "optimizer: state": moved}


def exchanges(setup, rates) -> dict[str, float]:
    """Gradients to their owners in float32, weights back in bf16: of a chip, or of the instances' EFA if slower."""
    apart, copies = ranks(setup.instances) // setup.axes["fsdp"], _together(setup) / setup.axes["fsdp"]

    def seconds(size):
        chips = size * setup.parameters * copies * (apart - 1) / apart / rates.link
        if setup.instances == 1:
            return chips
        efa = PUBLISHED["efa"].value * 2 * rates.of("link")  # a network's figure is each way
        return max(chips, size * setup.parameters / efa)

    return {"gradients to owners": seconds(4), "weights from owners": seconds(2)}


def decode(setup: Setup, rates: Rates, cores=1) -> dict[str, float]:
    """{term: seconds} of a step. cores: ranks that share a copy of the weights and their sequences (not built: 1)."""
    c = setup.config
    rows = setup.rows * cores
    heads = max(1, c.heads // cores // rates.cores)
    call = decode_kernel(rows, heads, c.key_dim, c.value_dim)
    moved = rows * (c.layers * elementwise(c)["forward"] + 2 * conv_bytes(setup)) / cores
    terms = {
        "projections and MLP": rates.matmul(setup.of_layers / cores, rows),
        "GLA kernel: states read and written": c.layers * rows * heads * rates.kernel(call),
        "elementwise and convolution cache": moved / rates.traffic,
        "latency of dependent operations": c.layers * rates.of("operations") * rates.of("operation"),
        "head": rates.matmul(setup.of_head / cores, rows),
        "sampling": rows * c.vocab_size * 4 * 3 / cores / rates.traffic,  # logits written, read for a maximum and a sum
    }
    if cores > 1:
        size = 3 * 2 * rows * c.dim * 2 * (cores - 1) / cores  # read, added, written
        terms["sums over a chip"] = (2 * c.layers + 1) * (rates.of("collective") + size / rates.traffic)
    return terms | {"launches": rates.of("programs") * rates.of("launch")}


def conv_bytes(setup) -> int:
    """Of the convolutions' cache of a sequence."""
    c = setup.config
    return setup.state_bytes - 4 * c.layers * c.heads * c.key_dim * c.value_dim


def roofline(setup) -> float:
    """Seconds of a decode step whose chips read one copy of the weights, and each state once and write it once."""
    chips = setup.instances * PUBLISHED["chips"].value
    weights = 2 * (setup.of_layers + setup.of_head)
    return (weights + 2 * setup.state_bytes * setup.sequences / chips) / PUBLISHED["hbm"].value


def floors(setup) -> dict[str, float]:
    """Seconds of a rank's HBM, at the published rate, for what a decode step cannot do without."""
    hbm = PUBLISHED["hbm"].value * Rates().share
    weights = 2 * (setup.of_layers + setup.of_head)
    return {"weights read": weights / hbm, "states read and written": 2 * setup.rows * setup.state_bytes / hbm}


def memory(setup: Setup, remat: str) -> dict[str, dict]:
    """{"train" | "decode": {what: bytes}} of the fullest rank."""
    from ringtide.models import muon

    c, fsdp, P = setup.config, setup.axes["fsdp"], setup.parameters
    block = setup.of_layers / c.layers
    of = lambda name: (12 if muon.is_matrix(name, setup.shapes[name]) else 16) * math.prod(setup.shapes[name])
    layer = setup.tokens * kept(c)
    training = {
        "weights": 2 * P / fsdp,
        "gradients": 2 * P / fsdp,
        "gathered weights and gradients": (12 * block + 8 * setup.of_head) if fsdp > 1 else 0,  # two blocks, float32
        "masters, moments, float32 gradients": max(sum(map(of, names)) for names in owned(setup)),
        "activations": c.layers * layer if remat == "none" else c.layers * 2 * setup.tokens * c.dim + layer,
        "loss": 4 * setup.of_head + 2 * setup.tokens * c.dim + 2 * 4 * 1024 * c.vocab_size,
    }
    decoding = {"weights": 2 * P, "states": setup.rows * setup.state_bytes, "logits": 4 * setup.rows * c.vocab_size}
    return {"train": training, "decode": decoding}


def limit() -> float:
    """Bytes of HBM of a rank."""
    return PUBLISHED["memory"].value * Rates().share


def plan_remat(setup) -> str:
    """The first of REMAT that fits, or the last."""
    return next((r for r in REMAT if sum(memory(setup, r)["train"].values()) <= limit()), REMAT[-1])


def plan(setup: Setup, remat=None) -> dict:
    """What is predicted, with its terms and ranges. remat: None takes the first of REMAT that fits."""
    check(setup)
    remat = remat or plan_remat(setup)
    used = memory(setup, remat)
    found = {}
    for scenario in SCENARIOS:
        rates = Rates(scenario)
        trained, hidden = train(setup, rates, remat)
        found[scenario] = {"train": trained, "decode": decode(setup, rates), "hidden": hidden}
    step = {s: sum(terms["train"].values()) for s, terms in found.items()}
    token = {s: sum(terms["decode"].values()) for s, terms in found.items()}
    a_step = setup.seq * setup.batch
    mfu = lambda speed: speed * flops(setup) / (PUBLISHED["peak"].value * PUBLISHED["chips"].value * setup.instances)
    shared = sum(decode(setup, Rates(), _chip()).values())
    return {
        "kind": "prediction",
        "model": setup.preset,
        "chip": "trn2",
        "instances": setup.instances,
        "parameters": setup.parameters,
        "state_bytes": setup.state_bytes,
        "train_step_s": step["assumed"],
        "train_tokens_per_s": a_step / step["assumed"],
        "train_mfu": mfu(a_step / step["assumed"]),
        "decode_step_s": token["assumed"],
        "decode_tokens_per_s": setup.sequences / token["assumed"],
        "roofline_tokens_per_s": setup.sequences / roofline(setup),
        "roofline_share": roofline(setup) / token["assumed"],
        "terms": {key: found["assumed"][key] for key in ("train", "decode", "hidden")},
        "floors": floors(setup),
        "range": {s: {key: found[s][key] for key in ("train", "decode")} for s in ("fast", "slow")},
        "train_tokens_per_s_range": [a_step / step["slow"], a_step / step["fast"]],
        "decode_tokens_per_s_range": [setup.sequences / token["slow"], setup.sequences / token["fast"]],
        "decode_tokens_per_s_copy_a_chip": setup.sequences / shared,
        "setup": {"seq": setup.seq, "batch": setup.batch, "sequences": setup.sequences, "mesh": setup.axes},
        "remat": remat,
        "fits": {key: sum(parts.values()) <= limit() for key, parts in used.items()},
        "memory_limit": limit(),
        "memory": used,
        "kernels": used_kernels(setup),
        "published": {n: dataclasses.asdict(f) for n, f in PUBLISHED.items()},
        "assumed": {n: dataclasses.asdict(f) for n, f in ASSUMED.items()},
        **reported(),
        "needed": needed() if setup.preset == "laplace-3b" else None,
    }


def reported() -> dict[str, float]:
    """What the published rates of laplace-3b on one instance come to, counted as the predictions are."""
    setup = Setup("laplace-3b")
    trained = PUBLISHED["train"].value * flops(setup) / (PUBLISHED["peak"].value * PUBLISHED["chips"].value)
    share = PUBLISHED["decode"].value * roofline(setup) / setup.sequences
    return {"published_mfu": trained, "published_roofline_share": share}


def needed() -> dict[str, float]:
    """Which values of single assumptions, all others as assumed, lead to the published rates."""
    setup = Setup("laplace-3b")
    remat = plan_remat(setup)
    trained = lambda x: setup.seq * setup.batch / sum(train(setup, Rates(instead=("matmul", x)), remat)[0].values())
    generated = lambda name, x: setup.sequences / sum(decode(setup, Rates(instead=(name, x))).values())
    goal = PUBLISHED["decode"].value
    return {
        "matmul": _least(lambda x: trained(x) >= PUBLISHED["train"].value, 1.0),
        "traffic": _least(lambda x: generated("traffic", x) >= goal, 1.0),
        "programs": math.floor(_least(lambda x: generated("programs", x) < goal, 1e5)),
    }


def _least(holds, high) -> float:
    """The least x for which holds(x), which is true at `high`, by bisection."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def used_kernels(setup) -> list[dict]:
    c, cores = setup.config, Rates().cores
    shape = c.heads // cores, c.key_dim, c.value_dim
    return [*kernels(*shape).values(), decode_kernel(setup.rows, *shape)]
