"""`nki.isa`: one file an engine group, gathered under the names of the public API."""
# ruff: noqa: F401

from ringtide.kernels.nki.simulator.isa.dma import dma_copy
from ringtide.kernels.nki.simulator.isa.enums import (
    dge_mode,
    dma_engine,
    engine,
    get_nc_sub_version,
    get_nc_version,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from ringtide.kernels.nki.simulator.isa.gpsimd import affine_select, iota
from ringtide.kernels.nki.simulator.isa.scalar import activation, activation_reduce
from ringtide.kernels.nki.simulator.isa.tensor_engine import nc_matmul, nc_matmul_mx, nc_transpose, quantize_mx
from ringtide.kernels.nki.simulator.isa.vector import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
    tensor_tensor_scan,
)
