"""Instructions that are not simulated: of Trainium3, random numbers, what is documented in contradicting ways."""

from ringtide.kernels.nki.simulator.errors import UnsupportedError
from ringtide.kernels.nki.simulator.isa import enums


def _refuse(op, why):
    raise UnsupportedError(f"{op}: {why}")


_NEWER = "needs Trainium3"
_RANDOM = "the random numbers of the hardware are not documented: pass them to the kernel as an input"


def nc_matmul_mx(
    dst,
    stationary,
    moving,
    stationary_scale,
    moving_scale,
    tile_position=None,
    tile_size=None,
    accumulate=None,
    name=None,
):
    _refuse("nc_matmul_mx", _NEWER)


def quantize_mx(dst, src, dst_scale, name=None):
    _refuse("quantize_mx", _NEWER)


def activate2(
    dst,
    op,
    data,
    imm0,
    imm1,
    op0,
    op1,
    relu_param=0.0,
    reverse0=False,
    reverse1=False,
    reduce_op=None,
    reduce_res=None,
    reduce_cmd=enums.reduce_cmd.idle,
    name=None,
):
    _refuse("activate2", f"{_NEWER}: use activation")


def exponential(
    dst,
    src,
    max_value=0.0,
    reduce_res=None,
    reduce_cmd=enums.reduce_cmd.idle,
    reduce_init=0.0,
    name=None,
):
    _refuse("exponential", f"{_NEWER}: use activation with nl.exp")


def rng(dst, engine=enums.engine.vector, name=None):
    _refuse("rng", _RANDOM)


def dropout(dst, data, prob, name=None):
    _refuse("dropout", _RANDOM)


def set_rng_seed(src_seeds, name=None):
    _refuse("set_rng_seed", _RANDOM)


def rand_set_state(src_seeds, engine=enums.engine.gpsimd, name=None):
    _refuse("rand_set_state", _RANDOM)


def rand_get_state(dst, engine=enums.engine.gpsimd, name=None):
    _refuse("rand_get_state", _RANDOM)


def rand2(dst, min, max, name=None):
    _refuse("rand2", _RANDOM)


def topk(val_dst, idx_dst, src, n, name=None):
    _refuse("topk", "how 16 partitions share their rows is documented in contradicting ways: use max8")
