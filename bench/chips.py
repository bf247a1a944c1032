"""What the published figures say of each TPU, and how the compiler's cycles compare with a device's clock.

A *device* is what JAX calls one: on v5p a whole chip (2 cores), on tpu7x one of the chip's two cores.
Sources: the system architecture pages at cloud.google.com/tpu/docs, which give the interconnect of a chip in both
directions and the memory of a host of 4 chips; clocks are those for which matrix units x side^2 gives the published
peak. `calibration` is measured over predicted time: from device timings of attention kernels that
tokamax publishes with its tuning tables, predicted by the reader in schedule.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    topology: str  # the smallest one that libtpu compiles for without a device
    ghz: float
    units: int  # matrix units a core
    side: int  # a matrix unit multiplies side x side
    rows: int  # rows of bf16 that a matrix unit takes a cycle: 8 f32 or 16 bf16 rows issue every 8/rows, 16/rows cycles
    cores: int  # TensorCores a device
    hbm: float  # bytes a second a device
    calibration: float
    delay: int  # bundles that still run after a branch
    memory: float  # GiB of HBM a device that the compiler lets a program use
    link: float  # bytes a second of a link of the interconnect, in one direction
    links: int  # of a device
    host: float  # bytes of the host's memory a device

    @property
    def flops_a_cycle(self) -> int:
        """Floating-point operations a cycle a core at the peak in bf16."""
        return 2 * self.units * self.side**2 * self.rows

    @property
    def peak(self) -> float:
        """FLOP/s of a device in bf16."""
        return self.flops_a_cycle * self.ghz * 1e9 * self.cores


HOST_RATE = 16e9  # bytes a second a device, each way over PCIe: no vendor's figure; what the field reckons with
CHIPS = {  # v5e: the calibration is not measured, but v5p's, the same core
    "v5e": Chip("v5e:2x2", 1.5, 4, 128, 1, 1, 0.82e12, 1.03, 4, 15.75, 50e9, 4, 48e9),
    "v5p": Chip("v5p:2x2x1", 1.75, 4, 128, 1, 2, 2.77e12, 1.03, 4, 95.74, 100e9, 6, 112e9),
    "v6e": Chip("v6e:2x2", 1.75, 2, 256, 2, 1, 1.64e12, 1.05, 6, 31.25, 100e9, 4, 180e9),
    "tpu7x": Chip("tpu7x:2x2x1", 2.2, 2, 256, 2, 1, 3.7e12, 1.2, 6, 94.75, 100e9, 3, 120e9),
}
