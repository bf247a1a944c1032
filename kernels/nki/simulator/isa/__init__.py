"""`nki.isa`: one file an engine or a subject, gathered under the names of the public API."""
# ruff: noqa: F401

from ringtide.kernels.nki.simulator.errors import NkiSimError as NkiValidationError
from ringtide.kernels.nki.simulator.isa.cores import core_barrier, sendrecv
from ringtide.kernels.nki.simulator.isa.dma import dma_compute, dma_copy, dma_transpose
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
from ringtide.kernels.nki.simulator.isa.gpsimd import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nonzero_with_count,
    sequence_bounds,
    tensor_partition_reduce,
)
from ringtide.kernels.nki.simulator.isa.matmul import nc_matmul, nc_transpose
from ringtide.kernels.nki.simulator.isa.missing import (
    activate2,
    dropout,
    exponential,
    nc_matmul_mx,
    quantize_mx,
    rand2,
    rand_get_state,
    rand_set_state,
    rng,
    set_rng_seed,
    topk,
)
from ringtide.kernels.nki.simulator.isa.registers import (
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from ringtide.kernels.nki.simulator.isa.rows import (
    bn_aggr,
    bn_stats,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_stream_shuffle,
    range_select,
    select_reduce,
    tensor_copy_predicated,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
)
from ringtide.kernels.nki.simulator.isa.scalar import activation, activation_reduce
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
from ringtide.kernels.nki.simulator.machine import Instruction as NkiInstruction
from ringtide.kernels.nki.simulator.tensor import VirtualRegister
