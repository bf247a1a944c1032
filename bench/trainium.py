"""Trainium2: what AWS publishes of it, what has to be assumed, and what the simulator says of the GLA kernels.

Two tables, and nothing else is known here: PUBLISHED has a source for each figure of the machine and for each rate that
others report; ASSUMED has a value, a favourable and an unfavourable one, and why. None of it was measured by us.
"""

import functools
from dataclasses import dataclass

import numpy as np

from ringtide.kernels.nki.simulator import cost

AWS = "AWS Neuron documentation"
SCENARIOS = "assumed", "fast", "slow"


@dataclass(frozen=True)
class Figure:
    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Assumption:
    assumed: float
    fast: float
    slow: float
    unit: str
    why: str


PUBLISHED = {
    "chips": Figure(16, "chips an instance", f"{AWS}, Amazon EC2 Trn2 Architecture: trn2.48xlarge"),
    "cores": Figure(8, "physical NeuronCores a chip", f"{AWS}, Trainium2 Architecture"),
    "peak": Figure(667e12, "FLOP/s a chip, bf16", f"{AWS}, Trainium2 Architecture; MFU is a share of it"),
    "clock": Figure(cost.CLOCK["PE"] * 1e6, "Hz of a tensor engine, 128 x 128", f"{AWS}, NKI: 79 TFLOP/s a core"),
    "memory": Figure(96 << 30, "bytes of HBM a chip", f"{AWS}, Trainium2 Architecture: 96 GiB"),
    "hbm": Figure(2.9e12, "bytes/s of HBM a chip", f"{AWS}, Trainium2 Architecture"),
    "link": Figure(1024e9, "bytes/s of NeuronLink a chip, in an instance", f"{AWS}, Amazon EC2 Trn2 Architecture"),
    "efa": Figure(3200e9 / 8, "bytes/s of EFA an instance", f"{AWS}, Amazon EC2 Trn2 Architecture: 3,200 Gbit/s"),
    "llama": Figure(
        47.95 * 8192 * (6 * 7.505e9 + 6 * 32 * 8192 * 4096) / (32 * 16 * 190e12),
        "MFU of Llama 3.1 8B on the chip before, 32 trn1.32xlarge", f"{AWS}, training: 47.95 sequences/s of 8,192",
    ),
    "train": Figure(120_000, "tokens/s of laplace-3b trained on one instance", "its article; 524,288 tokens a step"),
    "decode": Figure(11_544, "tokens/s of laplace-3b generated on one instance", "its article; 1,280 at once"),
}  # fmt: skip
ASSUMED = {
    "logical": Assumption(2, 2, 2, "physical cores a rank", "LNC 2, the default of trn2; a rank is a logical core"),
    "matmul": Assumption(
        0.66, 0.9, 0.39, "of the tensor engine's peak in large products",
        "measured on trn1, 4096 x 1024 x 2048, by lior-mechlovich/neuron-kernel-autotuner: blocked 0.66, tiled 0.39; "
        "AWS's NKI guide calls 0.9 good",
    ),
    "traffic": Assumption(
        0.6, 1.0, 0.3, "of the HBM's rate in what the compiler makes", "AWS's NKI guide calls 0.6 good; slow: not fused"
    ),
    "link": Assumption(0.5, 0.5, 0.25, "of a published rate of a link, each way", "the figure counts both directions"),
    "launch": Assumption(
        190e-6, 13e-6, 190e-6, "s between two programs of a core",
        "measured on inf2: SDK 2.30 13 us, 2.31 170 to 190 us (aws-neuron-sdk issue 1370)",
    ),
    "programs": Assumption(1, 1, 26, "programs a decode step", "one compiled step; slow: one a layer"),
    "operations": Assumption(13, 13, 26, "operations of a layer in a decode step", "each waits; slow: not fused"),
    "operation": Assumption(
        (2 * cost.DMA_LATENCY + cost.SYNC) * 1e-6, cost.SYNC * 1e-6, (2 * cost.DMA_LATENCY + cost.SYNC) * 1e-6,
        "s that an operation waits", "to and from HBM, 1.3 us each (AWS, NKI), and a semaphore; fast: on chip",
    ),
    "collective": Assumption(10e-6, 2e-6, 20e-6, "s a small collective", "AWS's guide to collectives: 1 to 10s of us"),
}  # fmt: skip
ESTIMATES = {  # of the simulator's times; T_sum leaves out transfers
    "assumed": ("t_sched_us",),
    "fast": ("t_max_us", "hbm_floor_us"),
    "slow": ("t_sum_us", "t_sched_us"),
}


@dataclass(frozen=True)
class Rates:
    """What a rank, a logical core, does in a second, in one of SCENARIOS; instead: (name, value) of an assumption."""

    scenario: str = "assumed"
    instead: tuple = ()

    def of(self, name) -> float:
        return self.instead[1] if name in self.instead else getattr(ASSUMED[name], self.scenario)

    @property
    def cores(self) -> int:
        """Physical cores of a rank."""
        return int(self.of("logical"))

    @property
    def share(self) -> float:
        """Of a chip, that a rank has."""
        return self.cores / PUBLISHED["cores"].value

    @property
    def traffic(self) -> float:
        """Bytes/s to and from HBM of what the compiler makes."""
        return PUBLISHED["hbm"].value * self.share * self.of("traffic")

    @property
    def link(self) -> float:
        """Bytes/s that a chip sends to other chips of its instance."""
        return PUBLISHED["link"].value * self.of("link")

    def matmul(self, parameters, rows) -> float:
        """Seconds of `rows` rows through matrices of so many parameters: the tensor engine, or the weights' way there.

        A tile of 128 x 128 weights takes a cycle a row, and 64 at least.
        """
        tiles = parameters / 128**2 * max(64, rows)
        engine = tiles / (PUBLISHED["clock"].value * self.cores * self.of("matmul"))
        return max(engine, 2 * parameters / self.traffic)

    def flops(self, count) -> float:
        """Seconds of so many floating-point operations in large products."""
        return count / (2 * 128**2 * PUBLISHED["clock"].value * self.cores * self.of("matmul"))

    def kernel(self, row) -> float:
        """Seconds of a unit of a kernel, of its row in `kernels`: the greater of two of the simulator's times."""
        return max(row[name] for name in ESTIMATES[self.scenario]) * 1e-6


def ranks(instances) -> int:
    figures = PUBLISHED["chips"].value * PUBLISHED["cores"].value
    return int(instances * figures / ASSUMED["logical"].assumed)


@functools.cache
def kernels(heads, K, V) -> dict[str, dict]:
    """{"forward" | "backward": row of `ringtide bench nki`} with so many heads on a physical core: us a unit."""
    from ringtide.bench import nki

    return {name: nki.row(nki.Case(name, K, V, heads))[0] for name in ("forward", "backward")}


@functools.cache
def decode_kernel(rows, heads, K, V) -> dict:
    """The four times of a whole call of the decode kernel on a physical core, us a (sequence, head), and its floor.

    rows: sequences; of more than two turns of the kernel's loop, two are simulated.
    """
    from ringtide.kernels.nki import gla_decode
    from ringtide.kernels.nki.simulator import dtypes, launch, schedule

    rows = min(rows, 2 * max(1, gla_decode.ROWS // heads))
    some = lambda *shape: np.full(shape, 0.5, np.float32)
    q, k, v = (dtypes.narrow(some(rows, heads, width), "bfloat16") for width in (K, K, V))
    slots = np.repeat(np.arange(rows, dtype=np.int32)[:, None], 2, axis=1)
    call = launch.simulate(gla_decode.gla_decode)
    call(q, k, v, -some(rows, heads, K), some(rows + gla_decode.SPARE, K, heads, V), slots, K**-0.5)
    found = schedule.times(call.last)
    names = "t_max_us", "t_sched_us", "t_list_us", "t_sum_us", "hbm_floor_us"
    return {"kernel": "decode", "d_k": K, "d_v": V, "heads": heads} | {n: found[n] / rows / heads for n in names}
