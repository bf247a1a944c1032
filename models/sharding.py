"""How a model in training lies over a mesh of devices: the one table, and the functions that go by it.

    data      batch                       the parameters are replicated
    fsdp      batch                       and the parameters are sharded
    ulysses   sequence, heads by all-to-all               "
    context   sequence, keys and values by ring           "

Everything but attention acts on each token by itself, so tokens never move: each device takes the whole weights of a
layer, cast to the compute dtype *before* they travel, only while it needs them, and gives its gradients back by a
reduce-scatter (ZeRO-3). The float32 parameters and Adam's moments exist once in each row of `data`.
"""

import math
from dataclasses import dataclass, fields

import jax
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringtide.models import BadInput, llama
from ringtide.models.tokenwise import tokenwise

AXES = "data", "fsdp", "ulysses", "context"
BATCH, SEQ, SHARDS = ("data", "fsdp"), ("ulysses", "context"), ("fsdp", "ulysses", "context")

# What a matrix (of a layer) is sharded by: its rows, over SHARDS. Rows may be many more than devices, and a shard is
# contiguous. Where they do not divide, or fewer than ROWS would be left (then the TPU compiler turns all-gathers of
# bf16 into all-reduces), over fewer axes: (ulysses, context), or (context,); as many as divide, if none leaves ROWS.
# Norms, and what nothing divides, are replicated. Adam's two moments lie as their parameter.
TABLE = {
    "embed": P(SHARDS, None),  # [V, D]
    "q": P(SHARDS, None),  # [D, N * H]
    "k": P(SHARDS, None),  # [D, K * H]
    "v": P(SHARDS, None),  # [D, K * H]
    "o": P(SHARDS, None),  # [N * H, D]
    "gate": P(SHARDS, None),  # [D, F]
    "up": P(SHARDS, None),  # [D, F]
    "down": P(SHARDS, None),  # [F, D]
    "unembed": P(SHARDS, None),  # [D, V]
}
TOKENS = P(BATCH, SEQ)  # [B, T], and activations [B, T, ...]
ROWS = 16
STRATEGIES = "all_gather", "ring", "ulysses", "usp", "auto"


@dataclass(frozen=True)
class Parallel:
    """The sizes of the mesh's axes, how attention works over the two of the sequence, what the backward pass keeps."""

    data: int = 1
    fsdp: int = 1
    ulysses: int = 1
    context: int = 1
    strategy: str = "ring"
    remat: str = "none"

    def __post_init__(self):
        for field in fields(self)[:4]:
            if type(size := getattr(self, field.name)) is not int or size < 1:
                raise BadInput(f"--mesh: {field.name} must be an int of at least 1, got {size!r}")
        for name, known in (("strategy", STRATEGIES), ("remat", tuple(llama.REMAT))):
            if getattr(self, name) not in known:
                raise BadInput(f"--{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        if min(self.ulysses, self.context) > 1 and self.strategy not in ("usp", "auto"):
            raise BadInput(
                f"--strategy {self.strategy}: works over one axis, got ulysses={self.ulysses}, context={self.context}: "
                "take usp, or make one of them 1"
            )

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.shards

    @property
    def shards(self) -> int:
        """Devices that a sequence lies over."""
        return self.ulysses * self.context

    @property
    def batch(self) -> int:
        """The batch must be a multiple of it."""
        return self.data * self.fsdp

    @property
    def seq_axis(self):
        """The mesh axes that attention works over, as `context_parallel_attention` takes them."""
        both = self.strategy == "usp" or min(self.ulysses, self.context) > 1
        return SEQ if both else "ulysses" if self.ulysses > 1 else "context"

    @property
    def layout(self) -> str:
        return "zigzag" if self.shards > 1 and self.strategy != "ulysses" else "contiguous"  # ulysses needs no balance


def make_mesh(parallel: Parallel, devices=None):
    """The mesh, of the first of `devices` [jax.devices()]: of all processes, or of a topology that is not there."""
    if devices is None:
        try:
            devices = jax.devices()
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise BadInput(f"jax finds no device, see JAX_PLATFORMS ({reason})") from None
    if parallel.devices > len(devices):
        have = "this process has" if len({x.process_index for x in devices}) == 1 else "all processes have"
        raise BadInput(f"--devices {parallel.devices}: {have} {len(devices)} {devices[0].platform} device(s)")
    sizes, devices = tuple(getattr(parallel, axis) for axis in AXES), devices[: parallel.devices]
    try:
        placed = mesh_utils.create_device_mesh(sizes, devices)
    except NotImplementedError:  # an axis of 8 on a torus of 4 x 4 x 4 lies over one and a half of its sides
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec_of(path, shape, mesh) -> P:
    """How a parameter lies, or what Adam keeps of it: path as jax.tree.map_with_path gives it, its last key counts.

    shape: of a matrix [rows, columns], or of those of all layers [L, rows, columns].
    """
    if not path or getattr(path[-1], "key", None) not in TABLE:
        return P()
    *layers, rows, _ = shape
    choices = [axes for axes in (SHARDS, SHARDS[1:], SHARDS[2:]) if rows % _size(mesh, axes) == 0]
    wide = [axes for axes in choices if rows // _size(mesh, axes) >= ROWS]
    spec = TABLE[path[-1].key]
    narrowed = [(wide or choices)[0] if axes == SHARDS else axes for axes in spec] if choices else [None] * len(spec)
    return P(*[None] * len(layers), *narrowed)


def shardings(tree, mesh):
    """The NamedSharding of every array of a state, given them or their shapes."""
    return jax.tree.map_with_path(lambda path, x: NamedSharding(mesh, spec_of(path, x.shape, mesh)), tree)


def each_token(mesh):
    """`tokenwise` for global arrays over the mesh: xs and at [B, T, ...] lie as TOKENS, w as the TABLE says."""

    def each(f, w, xs, at=(), **options):
        specs = jax.tree.map_with_path(lambda path, x: spec_of(path, x.shape, mesh), w)

        def gather(w):
            return jax.tree.map(_whole, w, specs)

        def local(w, xs, at):
            return tokenwise(f, w, xs, at, gather=gather, **options)

        run = jax.shard_map(local, mesh=mesh, in_specs=(specs, TOKENS, TOKENS), out_specs=TOKENS)
        return run(w, xs, at)

    return each


def _whole(x, spec):
    """A parameter from its shards, inside shard_map, for use with this device's tokens."""
    shards = (spec[0] if spec else None) or ()
    shards = (shards,) if isinstance(shards, str) else shards  # P makes a name of a tuple of one
    x = lax.pcast(x, tuple(axis for axis in AXES if axis not in shards), to="varying")
    for axis in reversed(shards):  # one after another: over 64 devices at once, the TPU compiler reduces instead
        x = lax.all_gather(x, axis, axis=0, tiled=True)
    return x


def _size(mesh, axes):
    return math.prod(mesh.shape[axis] for axis in axes)
