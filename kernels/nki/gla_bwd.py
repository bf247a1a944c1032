"""Chunked gated linear attention on Trainium2, backward: all gradients, exact for every gate in [-128, 0].

With D the gradient of the state, from the last chunk to the first (names and units as in gla.py; o = S^T q here, all
results are scaled at the end, and D starts from dhT / scale):

    dA [t, s] = do_t . v_s for s <= t, otherwise 0
    dv [s]  = A^T do + (k e^{b_C - b}) D
    dq [t]  = sum over levels of E_h * (dA_h (k E_h)) + dA_tt k_t + e^b * (S_in do)         E_h: e^(gate sums of level h)
    dk [s]  = sum over levels of E_h * (dA_h^T (q E_h)) + dA_ss q_s + e^{b_C - b} * (D v)
    D_in    = e^{b_C} D + (q e^b)^T do
    dg      = for every exponent, over the tokens whose gates it adds up: its factor e^.. times that factor's gradient

First the states that enter the chunks are computed again and left in HBM, in the dtype of the operands. Then, chunk by
chunk from the end, what makes this cheap is that both roles of a token share every step. P_h [K, C] holds k E_h in left
halves and q E_h in right halves; Z [r, c] = v_r . do_c if c lies in a right half, do_r . v_c if in a left one; so

    A_h = mask * P_h^T P_h          [dk | dq]_h = E_h * (P_h (mask * Z))

one matmul each a level, for all blocks at once. The mask keeps the pairs of tokens that lie in different halves of the
same block. What comes out is [K, C]; a matmul with the identity turns it round and adds up the levels, of left halves
into dk and of right halves into dq. Times k or q it is the gradient of the exponents, and the 0/1 matrices that summed
the gates, transposed, take it to dg: no pair of tokens is counted twice, so nothing has to cancel. (The usual reverse sum
of q dq - k dk cancels pairs: measured 2e-2 against 4e-3 in bfloat16, 2e-6 against 1e-7 in float32.) The gradient of
e^{b_C} S_in, its row sums with D, is the diagonal of S_in D^T; a matmul with ones spreads it over the tokens.

    SBUF, bytes a partition, 128/128, bfloat16     PSUM banks (8)
    constants                9.6 K                   0: q^T k^T, q e^b turned    4: P_h turned, Z, diagonal of A
    a chunk's inputs, outputs  3.0 K a head x 2      1: v^T do^T, S D turned     5: P_h turned (float32), A
    a unit                  14 K x DEPTH             2, 3: gate sums, [dk | dq]  6: dk dq dg
    D and its roundings     1.0 K a head             1, 3: sums of b; D, e^..    7: dv, added to D

Limits: K <= 128, V <= 256; ops.py splits what is larger.
"""

import numpy as np

from ringtide.kernels.nki import gla
from ringtide.kernels.nki.backend import nisa, nki, nl
from ringtide.kernels.nki.gla import BANK, GROUP, C, psum, window

LEVELS = (64, 32, 16, 8, 4, 2, 1)
B, REST, SUMS = 7 * C, 8 * C, 9 * C  # columns: b, b_C - b
DEPTH = 6
TURN = 16  # units of a turn of the loop over a long sequence, at least


def _intervals():
    """0/1 [token, column]: the gates that each exponent adds up: 128 columns a level, then b, then b_C - b."""
    token, column = np.arange(C)[:, None], np.arange(C)[None, :]
    parts = []
    for h in LEVELS:
        middle = column // (2 * h) * (2 * h) + h
        parts.append(np.where(column < middle, (column < token) & (token < middle), (middle <= token) & (token <= column)))
    return np.concatenate([*parts, token <= column, token > column], axis=1).astype(np.float32)


def _masks():
    """0/1 [r, c]: the pairs in different halves of the same block, 128 columns a level, then r = c."""
    r, c = np.arange(C)[:, None], np.arange(C)[None, :]
    parts = [(r // (2 * h) == c // (2 * h)) & (r % (2 * h) // h != c % (2 * h) // h) for h in LEVELS]
    return np.concatenate([*parts, r == c], axis=1).astype(np.float32)


INTERVALS, MASKS = _intervals(), _masks()
ADJOINT = np.concatenate(np.split(INTERVALS.T, 9), axis=1)  # [column, token] of each 128 columns, side by side


@nki.jit
def gla_backward(q, k, v, g, h0, do, dhT, scale):
    """(dq, dk, dv, dg, dh0) of <do, o> + <dhT, final state>, as gla.gla_forward; scale is not 0.

    do [B, T, N, V] in the dtype of v, dhT [B, N, K, V] float32. dg and dh0 are float32. With two cores an odd N is
    rounded up in the results.
    """
    batch, length, heads, K = q.shape
    V = v.shape[3]
    cores = nl.num_programs(0) if nl.program_ndim() > 0 else 1
    share = (heads + cores - 1) // cores
    core = nl.program_id(0) if cores > 1 else 0
    wide = share * cores
    dq = nl.ndarray((batch, length, wide, K), dtype=q.dtype, buffer=nl.shared_hbm)
    dk = nl.ndarray((batch, length, wide, K), dtype=q.dtype, buffer=nl.shared_hbm)
    dv = nl.ndarray((batch, length, wide, V), dtype=q.dtype, buffer=nl.shared_hbm)
    dg = nl.ndarray((batch, length, wide, K), dtype=nl.float32, buffer=nl.shared_hbm)
    dh0 = nl.ndarray((batch, wide, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    width = min(GROUP, share)
    chunks = (length + C - 1) // C
    states = nl.ndarray((chunks + 1, K, width, V), dtype=q.dtype, buffer=nl.private_hbm)
    tiles = Tiles(width, K, V, q.dtype)
    for b in range(batch):
        for first in range(0, share, width):
            count = min(width, share - first)
            into = core * share + first
            group = (b, min(into, heads - count), into, count)
            store_states(tiles, (k, v, g), h0, states, group)
            run_group(tiles, (q, k, v, do, g), (dq, dk, dv, dg), dhT, dh0, states, group, scale)
    return dq, dk, dv, dg, dh0


class Chunk(nl.NKIObject):
    """A chunk of the group in SBUF: inputs and results token-major, the states that enter it; one DMA each."""

    def __init__(self, heads, K, V, dtype):
        self.q = nl.ndarray((C, heads, K), dtype=dtype)
        self.k = nl.ndarray((C, heads, K), dtype=dtype)
        self.v = nl.ndarray((C, heads, V), dtype=dtype)
        self.do = nl.ndarray((C, heads, V), dtype=dtype)
        self.g = nl.ndarray((C, heads, K), dtype=nl.float32)
        self.states = nl.ndarray((K, heads, V), dtype=dtype)
        self.dq = nl.ndarray((C, heads, K), dtype=dtype)
        self.dk = nl.ndarray((C, heads, K), dtype=dtype)
        self.dv = nl.ndarray((C, heads, V), dtype=dtype)
        self.dg = nl.ndarray((C, heads, K), dtype=nl.float32)
        self.inputs = (self.q, self.k, self.v, self.do, self.g)
        self.outputs = (self.dq, self.dk, self.dv, self.dg)


class Unit(nl.NKIObject):
    """A unit's tiles in SBUF, out of the rings."""

    def __init__(self, rings, number):
        self.number = number
        for name in RINGS:
            ring = rings[name]
            setattr(self, name, ring[number % len(ring)])


class Tiles(nl.NKIObject):
    """All on-chip memory of the kernel, allocated once, and its constants."""

    def __init__(self, heads, K, V, dtype):
        self.K, self.V, self.dtype = K, V, dtype
        self.parts = [min(C, V - at) for at in range(0, V, C)]  # value channels of each part
        self.chunks = [Chunk(heads, K, V, dtype) for _ in range(2 + LAST)]
        self.units = [Unit(K, V, dtype) for _ in range(DEPTH)]
        self.state = [nl.ndarray((K, V), dtype=nl.float32) for _ in range(heads)]  # S going forward, D going back
        self.d_mm = [[nl.ndarray((K, V), dtype=dtype) for _ in range(2)] for _ in range(heads)]  # even, odd chunks
        self.banks = [psum(C, BANK) for _ in range(8)]
        self.turn = nl.ndarray((1, 1), dtype=nl.int32)
        self.intervals = nl.ndarray((C, SUMS), dtype=nl.float32)
        self.adjoint = nl.ndarray((C, 9, C), dtype=dtype)
        self.ones = nl.ndarray((C, C), dtype=nl.float32)
        self.masks = nl.ndarray((C, 8, C), dtype=dtype)
        nisa.dma_copy(dst=self.intervals, src=nl.shared_constant(INTERVALS))
        nisa.dma_copy(dst=self.adjoint.reshape((C, SUMS)), src=nl.shared_constant(ADJOINT))
        nisa.dma_copy(dst=self.masks.reshape((C, 8 * C)), src=nl.shared_constant(MASKS))
        nisa.memset(dst=self.ones, value=1.0, engine=nisa.engine.gpsimd)
        self.identity = self.masks[:, 7, :]

    def bank(self, number, rows, columns, at=0):
        """float32 [rows, columns] of a bank, from column `at` on."""
        return self.banks[number][0:rows, at : at + columns]

    def narrow(self, number, rows, columns, at=0):
        """As `bank`, in the dtype of the operands."""
        if self.dtype == nl.float32:
            return self.bank(number, rows, columns, at)
        return self.banks[number][0:rows, at : at + columns // 2].view(self.dtype)


class Work(nl.NKIObject):
    """A unit on its way. odd: whether its chunk is an odd one of the sequence."""

    def __init__(self, tiles, number, chunk, head, odd):
        self.unit, self.chunk, self.head, self.odd = tiles.units[number % DEPTH], chunk, head, odd
        self.q, self.k, self.v = chunk.q[:, head, :], chunk.k[:, head, :], chunk.v[:, head, :]
        self.do, self.g, self.s = chunk.do[:, head, :], chunk.g[:, head, :], chunk.states[:, head, :]


# --- the states again, from the first chunk to the last -----------------------------------------------------------------


def store_states(tiles, tensors, h0, states, group):
    """states [chunks + 1, K, heads, V]: what enters each chunk, and what leaves the last."""
    b, of, _, count = group
    length = tensors[0].shape[1]
    first = tiles.chunks[0]
    for i in range(count):
        nisa.dma_copy(dst=tiles.state[i], src=h0[b, of + i])
        nisa.activation(dst=first.states[:, i, :], op=nl.copy, data=tiles.state[i])
    nisa.dma_copy(dst=states[0, :, 0:count, :], src=first.states[:, 0:count, :])
    turns, each = turns_of(length, count)
    if turns > 0:
        loop, steps = split_turns(tensors, states, turns, each)

        def turn(i):
            forward_chunks(tiles, loop, steps, group, 0, each * C, i)

        nl.fori_loop(0, turns, turn)
    forward_chunks(tiles, tensors, states, group, turns * each * C, length, None)


def turns_of(length, count):
    """(turns of the loop over the sequence, chunks of each, an even number)."""
    each = 2 * ((TURN + 2 * count - 1) // (2 * count))
    turns = length // (each * C)
    return (turns if turns > 1 else 0), each


def split_turns(tensors, states, turns, each):
    """Tensors [B, turns, T, N, width], and states [turns, chunks, K, heads, V] of what leaves them."""
    loop = [x.slice(1, 0, turns * each * C).reshape_dim(1, (turns, each * C)) for x in tensors]
    return loop, states.slice(0, 1, turns * each + 1).reshape_dim(0, (turns, each))


def forward_chunks(tiles, tensors, states, group, start, end, turn):
    b, of, _, count = group
    starts = [t for t in range(start, end, C)]
    works = []
    for number in range(len(starts) * count):
        at = number // count
        works.append(Work(tiles, number, tiles.chunks[at % len(tiles.chunks)], number % count, at % 2))
    for step in range(-count, len(works) + 3):
        ahead = step + count
        if ahead % count == 0 and ahead < len(works):
            at = ahead // count
            chunk = works[ahead].chunk
            load((chunk.k, chunk.v, chunk.g), tensors, b, of, count, starts[at], min(end - starts[at], C), turn)
        for lag, stage in ((3, next_state), (1, decay_keys), (0, sum_rest)):
            number = step - lag
            if 0 <= number and number < len(works):
                stage(tiles, works[number])
                if stage == next_state and number % count == count - 1:
                    there = state_window(states, starts[number // count] // C + 1, count, turn, 1)
                    nisa.dma_copy(dst=there, src=works[number].chunk.states[:, 0:count, :])


def sum_rest(tiles, w):
    rest, total = tiles.bank(0, C, tiles.K), tiles.bank(1, tiles.K, 1)
    after = tiles.intervals[:, REST:SUMS]
    nisa.nc_matmul(dst=rest, stationary=after, moving=w.g, is_stationary_onezero=True, accumulate=False)
    nisa.nc_matmul(dst=total, stationary=w.g, moving=tiles.ones[:, 0:1], is_moving_onezero=True, accumulate=False)


def decay_keys(tiles, w):
    u = w.unit
    rest = u.pt[:, 0, :]
    nisa.activation(dst=rest, op=nl.exp, data=tiles.bank(0, C, tiles.K))
    nisa.activation(dst=u.total, op=nl.exp, data=tiles.bank(1, tiles.K, 1))
    nisa.tensor_tensor(dst=u.q_bt, data1=w.k, data2=rest, op=nl.multiply)


def next_state(tiles, w):
    u, state, add = w.unit, tiles.state[w.head], tiles.bank(7, tiles.K, tiles.V)
    nisa.nc_matmul(dst=add, stationary=u.q_bt, moving=w.v, accumulate=False)
    nisa.activation(dst=u.decayed, op=nl.copy, data=state, scale=u.total)
    nisa.tensor_tensor(dst=state, data1=u.decayed, data2=add, op=nl.add)
    nisa.activation(dst=w.s, op=nl.copy, data=state)


# --- a group of heads, from its last token to its first -----------------------------------------------------------------


def run_group(tiles, tensors, results, dhT, dh0, states, group, scale):
    b, of, into, count = group
    length = tensors[0].shape[1]
    chunks = (length + C - 1) // C
    for i in range(count):
        d = tiles.units[i % DEPTH].decayed
        nisa.dma_copy(dst=d, src=dhT[b, of + i])
        nisa.activation(dst=tiles.state[i], op=nl.copy, data=d, scale=1.0 / scale)
        nisa.activation(dst=tiles.d_mm[i][(chunks - 1) % 2], op=nl.copy, data=tiles.state[i])
    turns, each = turns_of(length, count)
    backward_chunks(tiles, tensors, results, states, group, turns * each * C, length, None, scale)
    if turns > 0:
        ins, _ = split_turns(tensors, states, turns, each)
        outs, _ = split_turns(results, states, turns, each)
        entering = states.slice(0, 0, turns * each).reshape_dim(0, (turns, each))
        nisa.memset(dst=tiles.turn, value=turns - 1, engine=nisa.engine.vector)

        def turn(i):
            backward_chunks(tiles, ins, outs, entering, group, 0, each * C, tiles.turn, scale)
            nisa.tensor_scalar(dst=tiles.turn, data=tiles.turn, op0=nl.subtract, operand0=1)

        nl.fori_loop(0, turns, turn)
    for i in range(count):
        d = tiles.units[i % DEPTH].decayed
        nisa.activation(dst=d, op=nl.copy, data=tiles.state[i], scale=scale)
        nisa.dma_copy(dst=dh0[b, into + i], src=d)


def backward_chunks(tiles, tensors, results, states, group, start, end, turn, scale):
    """Tokens start to end of the group, unit after unit down the pipeline."""
    b, of, into, count = group
    starts = [t for t in range(start, end, C)]
    starts = starts[::-1]
    works = []
    for number in range(len(starts) * count):
        at = number // count
        works.append(Work(tiles, number, tiles.chunks[at % len(tiles.chunks)], number % count, starts[at] // C % 2))
    for step in range(-count, len(works) + LAST + 1):
        ahead = step + count
        if ahead % count == 0 and ahead < len(works):
            at = ahead // count
            chunk = works[ahead].chunk
            load(chunk.inputs, tensors, b, of, count, starts[at], min(end - starts[at], C), turn)
            nisa.dma_copy(
                dst=chunk.states[:, 0:count, :], src=state_window(states, starts[at] // C, count, turn, 0)
            )
        for lag, stage in PIPELINE:
            number = step - lag
            if 0 <= number and number < len(works):
                stage(tiles, works[number], scale)
                if stage == finish and number % count == count - 1:
                    at = number // count
                    rows = min(end - starts[at], C)
                    for i in range(4):
                        there = window(results[i], b, starts[at], rows, into, count, turn)
                        nisa.dma_copy(dst=there, src=works[number].chunk.outputs[i][0:rows, 0:count, :])


def load(tiles, tensors, b, head, count, t, rows, turn):
    """A chunk's inputs. The tokens that the last one lacks are zeros, which add nothing to any sum."""
    for i in range(len(tiles)):
        if rows < C:
            nisa.memset(dst=tiles[i], value=0.0, engine=nisa.engine.gpsimd)
        nisa.dma_copy(dst=tiles[i][0:rows, 0:count, :], src=window(tensors[i], b, t, rows, head, count, turn))


def state_window(states, chunk, count, turn, skipped):
    """[K, count, V] of states [chunks, K, heads, V]; of [turns, chunks, K, heads, V], `skipped` chunks on, in a turn."""
    if turn is None:
        return states[chunk, :, 0:count, :]
    K, heads, V = states.shape[2], states.shape[3], states.shape[4]
    pattern = [[heads * V, K], [V, count], [1, V]]
    return states.ap(pattern=pattern, offset=(chunk - skipped) * K * heads * V, scalar_offset=turn, indirect_dim=0)


# --- the stages of a unit -----------------------------------------------------------------------------------------------


def halves(x, level, columns, first, apart):
    """[rows, blocks, 2, h] of x's free elements: left halves from `first` on, right halves `apart` columns further."""
    h = LEVELS[level]
    return x.ap(pattern=[[columns, x.shape[0]], [2 * h, 64 // h], [apart + h, 2], [1, h]], offset=first)


def left(x, level, columns, first):
    """[rows, blocks, h]: the left halves."""
    h = LEVELS[level]
    return x.ap(pattern=[[columns, x.shape[0]], [2 * h, 64 // h], [1, h]], offset=first)


def turn_inputs(tiles, w, scale):
    u, K = w.unit, tiles.K
    kq = tiles.narrow(0, K, 2 * C)
    nisa.nc_transpose(dst=kq[:, 0:C], data=w.k, engine=nisa.engine.tensor)
    nisa.nc_transpose(dst=kq[:, C : 2 * C], data=w.q, engine=nisa.engine.tensor)
    nisa.activation(dst=u.kq.reshape((K, 2 * C)), op=nl.copy, data=kq)
    for j in range(len(tiles.parts)):
        n = tiles.parts[j]
        part = tiles.narrow(1, n, 2 * C, 2 * C * j)
        nisa.nc_transpose(dst=part[:, 0:C], data=w.v[:, j * C : j * C + n], engine=nisa.engine.tensor)
        nisa.nc_transpose(dst=part[:, C : 2 * C], data=w.do[:, j * C : j * C + n], engine=nisa.engine.tensor)
        nisa.activation(dst=u.vdo[0:n, j, :, :], op=nl.copy, data=part.reshape_dim(1, (2, C)))


def sum_gates(tiles, w, scale):
    u, K = w.unit, tiles.K
    sums = (tiles.bank(2, K, BANK), tiles.bank(3, K, BANK), tiles.bank(0, K, C, 3 * C))
    for i in range(3):
        first = i * BANK
        n = sums[i].shape[1]
        columns = tiles.intervals[:, first : first + n]
        nisa.nc_matmul(dst=sums[i], stationary=w.g, moving=columns, is_moving_onezero=True, accumulate=False)
        nisa.activation(dst=u.decay[:, first : first + n], op=nl.exp, data=sums[i])
    nisa.activation(dst=u.total, op=nl.exp, data=sums[1][:, BANK - 1 : BANK])


def multiply(tiles, w, scale):
    u = w.unit
    for i in range(7):
        both, decay = halves(u.kq, i, 2 * C, 0, C), halves(u.decay, i, SUMS, i * C, 0)
        nisa.tensor_tensor(dst=halves(u.p, i, 7 * C, i * C, 0), data1=both, data2=decay, op=nl.multiply)
    nisa.tensor_tensor(dst=u.q_b, data1=u.kq[:, 1, :], data2=u.decay[:, B:REST], op=nl.multiply)
    nisa.tensor_tensor(dst=u.k_rest, data1=u.kq[:, 0, :], data2=u.decay[:, REST:SUMS], op=nl.multiply)


def turn_products(tiles, w, scale):
    u, K = w.unit, tiles.K
    for first, n, number in ((0, 4, 4), (4, 3, 5)):
        pt = tiles.narrow(number, C, n * K)
        for i in range(n):
            nisa.nc_transpose(dst=pt[:, i * K : (i + 1) * K], data=u.p[:, first + i, :], engine=nisa.engine.tensor)
        nisa.activation(dst=u.pt[:, first : first + n, :], op=nl.copy, data=pt.reshape_dim(1, (n, K)))
    q_bt = tiles.narrow(0, C, K, 2 * C)
    nisa.nc_transpose(dst=q_bt, data=u.q_b, engine=nisa.engine.tensor)
    nisa.activation(dst=u.q_bt, op=nl.copy, data=q_bt)


def meet_values(tiles, w, scale):
    """Z: both orders of v and do."""
    u = w.unit
    z = tiles.bank(4, C, 2 * C)
    for side in range(2):
        for j in range(len(tiles.parts)):
            rows, columns = u.vdo[0 : tiles.parts[j], j, 1 - side, :], u.vdo[0 : tiles.parts[j], j, side, :]
            there = z[:, side * C : (side + 1) * C]
            nisa.nc_matmul(dst=there, stationary=rows, moving=columns, accumulate=j > 0)
    nisa.activation(dst=u.z, op=nl.copy, data=z.reshape_dim(1, (2, C)))


def mask_values(tiles, w, scale):
    u = w.unit
    for i in range(7):
        met, allowed = halves(u.z, i, 2 * C, 0, C), halves(tiles.masks, i, 8 * C, i * C, 0)
        nisa.tensor_tensor(dst=halves(u.zm, i, 8 * C, i * C, 0), data1=met, data2=allowed, op=nl.multiply)
    nisa.tensor_tensor(dst=u.zm[:, 7, :], data1=u.z[:, 1, :], data2=tiles.identity, op=nl.multiply)


def score(tiles, w, scale):
    u = w.unit
    for i in range(7):
        there = tiles.bank(5, C, 64, 64 * i).reshape_dim(1, (64 // LEVELS[i], LEVELS[i]))
        keys = left(u.p, i, 7 * C, i * C)
        nisa.nc_matmul(dst=there, stationary=u.p[:, i, :], moving=keys, accumulate=False)
        allowed = left(tiles.masks, i, 8 * C, i * C)
        nisa.tensor_tensor(dst=left(u.a, i, 8 * C, i * C), data1=there, data2=allowed, op=nl.multiply)
    diagonal = tiles.bank(4, C, C, 2 * C)
    nisa.nc_matmul(dst=diagonal, stationary=u.kq[:, 1, :], moving=u.kq[:, 0, :], accumulate=False)
    nisa.tensor_tensor(dst=u.a[:, 7, :], data1=diagonal, data2=tiles.identity, op=nl.multiply)


def meet_keys(tiles, w, scale):
    """E_h * (P_h (mask * Z)), left halves to dk, right halves to dq."""
    u = w.unit
    for i in range(7):
        there = tiles.bank(2 + i // 4, tiles.K, C, i % 4 * C)
        nisa.nc_matmul(dst=there, stationary=u.pt[:, i, :], moving=u.zm[:, i, :], accumulate=False)
        met = there.reshape_dim(1, (64 // LEVELS[i], 2, LEVELS[i]))
        decay = halves(u.decay, i, SUMS, i * C, 0)
        nisa.tensor_tensor(dst=halves(u.y, i, 16 * C, 2 * C * i, C), data1=met, data2=decay, op=nl.multiply)


def turn_states(tiles, w, scale):
    """S and D [K, V] as [V, K], 128 value channels at a time."""
    u, d = w.unit, tiles.d_mm[w.head][w.odd]
    for j in range(len(tiles.parts)):
        n = tiles.parts[j]
        for x, turned, at in ((w.s, u.st, j * C), (d, u.dt, (2 + j) * C)):
            part = tiles.narrow(1, n, tiles.K, at)
            nisa.nc_transpose(dst=part, data=x[:, j * C : j * C + n], engine=nisa.engine.tensor)
            nisa.activation(dst=turned[0:n, j, :], op=nl.copy, data=part)


def meet_states(tiles, w, scale):
    """What the entering state adds to dq, the gradient of the leaving one to dk, and both together to e^(b_C)."""
    u, K = w.unit, tiles.K
    to_q, to_k, through = tiles.bank(3, K, C, 3 * C), tiles.bank(0, K, C), tiles.bank(0, K, K, C)
    for j in range(len(tiles.parts)):
        n = tiles.parts[j]
        v, do, s, d = u.vdo[0:n, j, 0, :], u.vdo[0:n, j, 1, :], u.st[0:n, j, :], u.dt[0:n, j, :]
        nisa.nc_matmul(dst=to_q, stationary=s, moving=do, accumulate=j > 0)
        nisa.nc_matmul(dst=to_k, stationary=d, moving=v, accumulate=j > 0)
        nisa.nc_matmul(dst=through, stationary=s, moving=d, accumulate=j > 0)
    nisa.tensor_tensor(dst=u.y[:, 7, 1, :], data1=to_q, data2=u.decay[:, B:REST], op=nl.multiply)
    nisa.tensor_tensor(dst=u.y[:, 7, 0, :], data1=to_k, data2=u.decay[:, REST:SUMS], op=nl.multiply)
    nisa.scalar_tensor_tensor(
        dst=u.through, data=through, op0=nl.multiply, operand0=u.total, op1=nl.multiply, operand1=tiles.identity[0:K, 0:K]
    )


def add_up(tiles, w, scale):
    u, K = w.unit, tiles.K
    identity = tiles.identity[0:K, 0:K]
    for side in range(2):
        there = tiles.bank(6, C, K, side * C)
        for i in range(8):
            nisa.nc_matmul(dst=there, stationary=u.y[:, i, side, :], moving=identity, accumulate=i > 0)
        other = w.q if side == 0 else w.k
        nisa.nc_matmul(dst=there, stationary=u.zm[:, 7, :], moving=other, accumulate=True)


def differentiate_sums(tiles, w, scale):
    """The gradient of an exponent: that of k or q at its level, times k or q."""
    u = w.unit
    for i in range(7):
        slope, by = halves(u.y, i, 16 * C, 2 * C * i, C), halves(u.kq, i, 2 * C, 0, C)
        nisa.tensor_tensor(dst=halves(u.sums, i, SUMS, i * C, 0), data1=slope, data2=by, op=nl.multiply)
    nisa.tensor_tensor(dst=u.sums[:, 7, :], data1=u.y[:, 7, 1, :], data2=u.kq[:, 1, :], op=nl.multiply)
    nisa.tensor_tensor(dst=u.sums[:, 8, :], data1=u.y[:, 7, 0, :], data2=u.kq[:, 0, :], op=nl.multiply)


def turn_sums(tiles, w, scale):
    u, K = w.unit, tiles.K
    for first, n, number, at in ((0, 4, 4, 0), (4, 4, 5, 0), (8, 1, 0, 2 * C)):
        turned = tiles.narrow(number, C, n * K, at)
        for i in range(n):
            part = turned[:, i * K : (i + 1) * K]
            nisa.nc_transpose(dst=part, data=u.sums[:, first + i, :], engine=nisa.engine.tensor)
        nisa.activation(dst=u.sums_t[:, first : first + n, :], op=nl.copy, data=turned.reshape_dim(1, (n, K)))


def gates(tiles, w, scale):
    u, K = w.unit, tiles.K
    dg = tiles.bank(6, C, K, 2 * C)
    ones = tiles.ones[0:K, :]
    nisa.nc_matmul(dst=dg, stationary=ones, moving=u.through, is_stationary_onezero=True, accumulate=False)
    for i in range(9):
        adjoint = tiles.adjoint[:, i, :]
        nisa.nc_matmul(dst=dg, stationary=adjoint, moving=u.sums_t[:, i, :], accumulate=True)


def values(tiles, w, scale):
    u = w.unit
    there = tiles.bank(7, C, tiles.V)
    for i in range(8):
        nisa.nc_matmul(dst=there, stationary=u.a[:, i, :], moving=w.do, accumulate=i > 0)
    nisa.nc_matmul(dst=there, stationary=u.k_rest, moving=tiles.d_mm[w.head][w.odd], accumulate=True)


def next_gradient(tiles, w, scale):
    """D of the chunk before."""
    u, d, add = w.unit, tiles.state[w.head], tiles.bank(7, tiles.K, tiles.V, 2 * C)
    nisa.nc_matmul(dst=add, stationary=u.q_bt, moving=w.do, accumulate=False)
    nisa.activation(dst=u.decayed, op=nl.copy, data=d, scale=u.total)
    nisa.tensor_tensor(dst=d, data1=u.decayed, data2=add, op=nl.add)
    nisa.activation(dst=tiles.d_mm[w.head][1 - w.odd], op=nl.copy, data=d)


def finish(tiles, w, scale):
    chunk, K = w.chunk, tiles.K
    nisa.activation(dst=chunk.dk[:, w.head, :], op=nl.copy, data=tiles.bank(6, C, K), scale=scale)
    nisa.activation(dst=chunk.dq[:, w.head, :], op=nl.copy, data=tiles.bank(6, C, K, C), scale=scale)
    nisa.activation(dst=chunk.dg[:, w.head, :], op=nl.copy, data=tiles.bank(6, C, K, 2 * C), scale=scale)
    nisa.activation(dst=chunk.dv[:, w.head, :], op=nl.copy, data=tiles.bank(7, C, tiles.V), scale=scale)


# (how many units behind the first stage, stage), in the order in which a step issues them.
PIPELINE = (
    (5, add_up),
    (5, gates),
    (5, values),
    (5, next_gradient),
    (5, finish),
    (4, turn_states),
    (4, meet_states),
    (4, differentiate_sums),
    (4, turn_sums),
    (3, meet_keys),
    (2, meet_values),
    (2, score),
    (2, mask_values),
    (1, multiply),
    (1, turn_products),
    (0, turn_inputs),
    (0, sum_gates),
)
LAST = 5
