"""Chunked gated linear attention on Trainium2, forward: exact for every gate in [-128, 0].

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

A unit is a chunk of C = 128 tokens of one head. Tokens lie on the partitions where they are summed over, key channels
([K, C]) where those are. Every exponent is a sum of gates over an interval of tokens, which the tensor engine makes by
multiplying g [C, K] with a constant 0/1 matrix; a sum of numbers <= 0 is <= 0, so nothing overflows and nothing cancels.
Token s meets token t > s at the one level h = 64, 32, ..., 1 where they lie in the left and the right half of the same
block of 2h tokens, and both decay towards its middle:

      left half            right half
    . . s - - - - - - - | - - - - t . .        P_h[d, s] = k e^{sum of g over (s, middle)}
                                               P_h[d, t] = q e^{sum of g over [middle, t]}

    scores [s, t]     levels 64, 32, 16: block by block, each among zeros, summed in PSUM
                      levels 8, 4, 2, 1: P_h^T P_h, all blocks at once, times a constant 0/1 mask
                      s = t: k^T q, times the identity
    o [t, V] = scale * (scores^T v + (q e^b)^T S)          b: inclusive sum of g from the chunk's start
    S [K, V] = e^{b_C} S + (k e^{b_C - b})^T v

`fast` meets all tokens of a block of 16 at once instead of at levels 8 to 1: the exponents of k are then as far above 0
as 15 gates are below. It is right only where 15 * max|g| < 88, which the caller knows.

Cycles of a unit of 128/128 in bfloat16 (as simulator/cost.py prices them):

    PE    q^T, k^T 256; gate sums 2176 (float32 against 0/1: 2 a column); scores 832; scores^T v 768; q S, k^T v 256
    ACT   q^T, k^T out of PSUM 256; exponentials 1152; scores 112; e^{b_C} S, S to bfloat16, o out of PSUM 384
    DVE   P_h, k e^.. and q e^b 1088; masks 384; S + k^T v 128

A unit goes through stages that lie several units apart (PIPELINE): an engine in its recorded order hardly waits for
another one.

    SBUF, bytes a partition, 128/128, bfloat16     PSUM banks (8)
    constants                6.0 K                   gate sums            2 x 2
    a chunk's q k v g o      1.5 K a head x 3        transposes, b_C - b  1
    exponentials, P_h        7.5 K x DEPTH           scores               1
    scores                   1.5 K x DEPTH           o                    1
    states                   1.0 K a head            k^T v                1

Limits: K <= 128, V <= 512; ops.py splits what is larger. float32 inputs are multiplied in float32, at a quarter of the
speed.
"""

import numpy as np

from ringtide.kernels.nki.backend import nisa, nki, nl

C = 128  # tokens a chunk: one a partition
COARSE, FINE = (64, 32, 16), (8, 4, 2)  # level 1 stands apart: there k does not decay
BANK = 512  # float32 columns of a PSUM bank
GROUP = 8  # heads that take turns; more of them hide more, and take more SBUF
TURN = 32  # units of a turn of the loop over a long sequence, at least
DEPTH = 3  # units whose tiles are alive at once


def _intervals(fast):
    """0/1 [token, column]: the gates that each exponent adds up. 128 columns a level, 64 of level 1, 128 of b."""
    token, column = np.arange(C)[:, None], np.arange(C)[None, :]
    parts = []
    for h in COARSE if fast else (*COARSE, *FINE):
        middle = column // (2 * h) * (2 * h) + h
        parts.append(np.where(column < middle, (column < token) & (token < middle), (middle <= token) & (token <= column)))
    parts.append((column // 16 * 16 < token) & (token <= column) if fast else (token == column)[:, 1::2])
    parts.append(token <= column)
    return np.concatenate(parts, axis=1).astype(np.float32)


def _masks(fast):
    """0/1 [s, t]: the pairs that meet. 64 columns, the right halves, of each level 8 to 1, then 128 of s = t; or 128."""
    s, t = np.arange(C)[:, None], np.arange(C)[None, :]
    if fast:
        return ((s // 16 == t // 16) & (s <= t)).astype(np.float32)
    parts = [((s // (2 * h) == t // (2 * h)) & (s % (2 * h) < h))[:, t[0] % (2 * h) >= h] for h in (*FINE, 1)]
    return np.concatenate([*parts, s == t], axis=1).astype(np.float32)


INTERVALS, MASKS = _intervals(False), _masks(False)
FAST_INTERVALS, FAST_MASKS = _intervals(True), _masks(True)
AFTER = np.tril(np.ones((C, C), np.float32), -1)  # [token, column]: the gates after the column's token


@nki.jit
def gla_forward(q, k, v, g, h0, scale, fast=False):
    """(o, final state). q, k [B, T, N, K], v [B, T, N, V] of one dtype, g [B, T, N, K] float32 in [-128, 0],
    h0 [B, N, K, V] float32. With two cores an odd N is rounded up in the results; the last head is computed twice."""
    batch, length, heads, K = q.shape
    V = v.shape[3]
    cores = nl.num_programs(0) if nl.program_ndim() > 0 else 1
    share = (heads + cores - 1) // cores
    o = nl.ndarray((batch, length, share * cores, V), dtype=v.dtype, buffer=nl.shared_hbm)
    final = nl.ndarray((batch, share * cores, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0) if cores > 1 else 0
    constants = load_constants(fast)
    width = min(GROUP, share)
    tiles = Tiles(width, K, V, v.dtype, fast)
    for b in range(batch):
        for first in range(0, share, width):
            count = min(width, share - first)
            into = core * share + first
            of = min(into, heads - count)
            run_group(tiles, constants, (q, k, v, g, h0, o, final), b, of, into, count, scale, fast)
    return o, final


def load_constants(fast):
    """The 0/1 matrices in SBUF, float32: intervals, masks, after."""
    made = []
    for x in (FAST_INTERVALS, FAST_MASKS, AFTER) if fast else (INTERVALS, MASKS, AFTER):
        tile = nl.ndarray(x.shape, dtype=nl.float32)
        nisa.dma_copy(dst=tile, src=nl.shared_constant(x))
        made.append(tile)
    return made


class Chunk(nl.NKIObject):
    """A chunk's inputs and its output in SBUF, token-major, all heads of the group: one DMA each."""

    def __init__(self, heads, K, V, dtype):
        self.q = nl.ndarray((C, heads, K), dtype=dtype)
        self.k = nl.ndarray((C, heads, K), dtype=dtype)
        self.v = nl.ndarray((C, heads, V), dtype=dtype)
        self.g = nl.ndarray((C, heads, K), dtype=nl.float32)
        self.o = nl.ndarray((C, heads, V), dtype=dtype)


class Unit(nl.NKIObject):
    """What a unit keeps in SBUF between its stages. What is 0 in `coarse` and `scores` is 0 for good."""

    def __init__(self, K, V, dtype, fast):
        sums = (FAST_INTERVALS if fast else INTERVALS).shape[1]
        self.kq = nl.ndarray((K, 2 * C + 64), dtype=dtype)  # k^T | q^T | q e^g at odd t
        self.decay = nl.ndarray((K, sums), dtype=dtype)  # e^(gate sums)
        self.total = nl.ndarray((K, 1), dtype=nl.float32)  # e^(b_C)
        self.rest = nl.ndarray((C, K), dtype=dtype)  # e^(b_C - b)
        self.k_rest = nl.ndarray((C, K), dtype=dtype)  # k e^(b_C - b)
        self.q_b = nl.ndarray((K, C), dtype=dtype)  # q e^b
        # A block's k with zeros on both sides, so that 128 columns around it put it at its own rows of the scores; its q.
        self.coarse = [nl.ndarray((K, 64 // h, 256 - h), dtype=dtype) for h in COARSE]
        if fast:
            self.grow = nl.ndarray((K, C), dtype=dtype)  # e^-(sum of g from the block's start)
            self.near = nl.ndarray((K, 2 * C), dtype=dtype)  # k and q towards it
        else:
            self.fine = nl.ndarray((K, 3, C), dtype=dtype)  # P_h
        self.scores = [nl.ndarray((C, C), dtype=dtype) for _ in range(2 if fast else 6)]  # [s, t]
        self.decayed = nl.ndarray((K, V), dtype=nl.float32)  # e^(b_C) S
        for x in (*self.coarse, *self.scores):
            nisa.memset(dst=x, value=0.0, engine=nisa.engine.gpsimd)


class Tiles(nl.NKIObject):
    """All on-chip memory of a kernel, allocated once."""

    def __init__(self, heads, K, V, dtype, fast):
        self.K, self.V, self.dtype, self.fast = K, V, dtype, fast
        self.chunks = [Chunk(heads, K, V, dtype) for _ in range(3)]
        self.units = [Unit(K, V, dtype, fast) for _ in range(DEPTH)]
        self.state = [nl.ndarray((K, V), dtype=nl.float32) for _ in range(heads)]
        self.state_mm = [[nl.ndarray((K, V), dtype=dtype) for _ in range(2)] for _ in range(heads)]  # even, odd chunks
        sums = (FAST_INTERVALS if fast else INTERVALS).shape[1]
        self.sums = [[psum(K, BANK), psum(K, sums - BANK)] for _ in range(2)]
        self.turned, self.scores, self.out, self.add = psum(C, BANK), psum(C, BANK), psum(C, V), psum(K, V)
        side = 2 * C if dtype == nl.float32 else C  # float32 columns that k^T | q^T take
        self.kq = self.turned[0:K, C : C + side]
        if dtype != nl.float32:
            self.kq = self.kq.view(dtype)


class Work(nl.NKIObject):
    """A unit on its way: its tiles, its chunk's, its head, and whether its chunk is an odd one."""

    def __init__(self, tiles, number, chunk, head, odd):
        self.unit, self.sums = tiles.units[number % DEPTH], tiles.sums[number % 2]
        self.chunk, self.head, self.odd = chunk, head, odd
        self.q, self.k, self.v, self.g = chunk.q[:, head, :], chunk.k[:, head, :], chunk.v[:, head, :], chunk.g[:, head, :]


def psum(rows, columns):
    return nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)


# --- a group of heads, from its first token to its last -----------------------------------------------------------------


def run_group(tiles, constants, tensors, b, of, into, count, scale, fast):
    """`count` heads of sequence b: inputs from head `of` on, results to head `into` on."""
    q, k, v, g, h0, o, final = tensors
    for i in range(count):
        nisa.dma_copy(dst=tiles.state[i], src=h0[b, of + i])
        nisa.activation(dst=tiles.state_mm[i][0], op=nl.copy, data=tiles.state[i])
    length = q.shape[1]
    each = 2 * ((TURN + 2 * count - 1) // (2 * count))  # chunks a turn, even: states alternate
    turns = length // (each * C)
    if turns < 2:
        turns = 0
    if turns > 0:
        loop = []
        for x in (q, k, v, g, o):
            loop.append(x.slice(1, 0, turns * each * C).reshape_dim(1, (turns, each * C)))

        def turn(i):
            run_chunks(tiles, constants, loop, b, of, into, count, scale, 0, each * C, i)

        nl.fori_loop(0, turns, turn)
    run_chunks(tiles, constants, [q, k, v, g, o], b, of, into, count, scale, turns * each * C, length, None)
    for i in range(count):
        nisa.dma_copy(dst=final[b, into + i], src=tiles.state[i])


def run_chunks(tiles, constants, tensors, b, of, into, count, scale, start, end, turn):
    """Tokens start to end of the group, unit after unit down the pipeline."""
    starts = [t for t in range(start, end, C)]
    works = []
    for number in range(len(starts) * count):
        at = number // count
        works.append(Work(tiles, number, tiles.chunks[at % 3], number % count, at % 2))
    for step in range(-count, len(works) + PIPELINE[0][0] + 1):
        ahead = step + count
        if ahead % count == 0 and ahead < len(works):
            at = ahead // count
            load(tiles.chunks[at % 3], tensors, b, of, count, starts[at], min(end - starts[at], C), turn)
        for lag, stage in PIPELINE:
            number = step - lag
            if 0 <= number and number < len(works):
                stage(tiles, constants, works[number], scale)
                if stage == finish and number % count == count - 1:
                    at = number // count
                    rows = min(end - starts[at], C)
                    there = window(tensors[4], b, starts[at], rows, into, count, turn)
                    nisa.dma_copy(dst=there, src=tiles.chunks[at % 3].o[0:rows, 0:count, :])


def window(x, b, t, rows, head, count, turn):
    """[rows, count, width] of x [B, T, N, width] from token t and head on; of x [B, turns, T, N, width] in turn `turn`."""
    if turn is None:
        return x[b, t : t + rows, head : head + count, :]
    heads, width = x.shape[3], x.shape[4]
    offset = ((b * x.shape[1] * x.shape[2] + t) * heads + head) * width
    pattern = [[heads * width, rows], [width, count], [1, width]]
    return x.ap(pattern=pattern, offset=offset, scalar_offset=turn, indirect_dim=1)


def load(chunk, tensors, b, head, count, t, rows, turn):
    """A chunk's inputs. The tokens that the last one lacks are zeros, which leave the state as it is."""
    tiles = (chunk.q, chunk.k, chunk.v, chunk.g)
    for i in range(4):
        if rows < C:
            nisa.memset(dst=tiles[i], value=0.0, engine=nisa.engine.gpsimd)
        nisa.dma_copy(dst=tiles[i][0:rows, 0:count, :], src=window(tensors[i], b, t, rows, head, count, turn))


# --- the stages of a unit -----------------------------------------------------------------------------------------------


def sum_gates(tiles, constants, w, scale):
    intervals, _, after = constants
    nisa.nc_transpose(dst=tiles.kq[:, 0:C], data=w.k, engine=nisa.engine.tensor)
    nisa.nc_transpose(dst=tiles.kq[:, C : 2 * C], data=w.q, engine=nisa.engine.tensor)
    rest = tiles.turned[:, 0 : tiles.K]  # [C, K]
    nisa.nc_matmul(dst=rest, stationary=after, moving=w.g, is_stationary_onezero=True, accumulate=False)
    for i in range(2):
        columns = intervals[:, i * BANK : min((i + 1) * BANK, intervals.shape[1])]
        nisa.nc_matmul(dst=w.sums[i], stationary=w.g, moving=columns, is_moving_onezero=True, accumulate=False)


def exponents(tiles, constants, w, scale):
    u = w.unit
    nisa.activation(dst=u.kq[:, 0 : 2 * C], op=nl.copy, data=tiles.kq)
    nisa.activation(dst=u.rest, op=nl.exp, data=tiles.turned[:, 0 : tiles.K])
    last = w.sums[1].shape[1]
    nisa.activation(dst=u.decay[:, 0:BANK], op=nl.exp, data=w.sums[0])
    nisa.activation(dst=u.decay[:, BANK : BANK + last], op=nl.exp, data=w.sums[1])
    nisa.activation(dst=u.total, op=nl.exp, data=w.sums[1][:, last - 1 : last])
    if tiles.fast:
        nisa.activation(dst=u.grow, op=nl.exp, data=w.sums[0][:, 3 * C : BANK], scale=-1.0)


def multiply(tiles, constants, w, scale):
    u, K = w.unit, tiles.K
    row = u.kq.shape[1]
    for i in range(len(COARSE)):
        h = COARSE[i]
        blocks = 64 // h
        # Left halves from k^T, right halves from q^T, which lies C columns further.
        both = u.kq.ap(pattern=[[row, K], [2 * h, blocks], [C + h, 2], [1, h]])
        decay = u.decay[:, i * C : (i + 1) * C].reshape_dim(1, (blocks, 2, h))
        there = u.coarse[i].ap(
            pattern=[[blocks * (256 - h), K], [256 - h, blocks], [C, 2], [1, h]], offset=C - 2 * h
        )
        nisa.tensor_tensor(dst=there, data1=both, data2=decay, op=nl.multiply)
    last = u.decay.shape[1]
    nisa.tensor_tensor(dst=u.k_rest, data1=w.k, data2=u.rest, op=nl.multiply)
    if tiles.fast:
        near = u.decay[:, 3 * C : 4 * C]
        nisa.tensor_tensor(dst=u.near[:, 0:C], data1=u.kq[:, 0:C], data2=u.grow, op=nl.multiply)
        nisa.tensor_tensor(dst=u.near[:, C : 2 * C], data1=u.kq[:, C : 2 * C], data2=near, op=nl.multiply)
    else:
        for i in range(len(FINE)):
            h = FINE[i]
            both = u.kq.ap(pattern=[[row, K], [2 * h, 64 // h], [C + h, 2], [1, h]])
            decay = u.decay[:, (3 + i) * C : (4 + i) * C].reshape_dim(1, (64 // h, 2, h))
            there = u.fine[:, i, :].reshape_dim(1, (64 // h, 2, h))
            nisa.tensor_tensor(dst=there, data1=both, data2=decay, op=nl.multiply)
        odd = u.kq.ap(pattern=[[row, K], [2, 64]], offset=C + 1)
        nisa.tensor_tensor(dst=u.kq[:, 2 * C : row], data1=odd, data2=u.decay[:, 6 * C : 6 * C + 64], op=nl.multiply)
    nisa.tensor_tensor(dst=u.q_b, data1=u.kq[:, C : 2 * C], data2=u.decay[:, last - C : last], op=nl.multiply)


def score(tiles, constants, w, scale):
    u, s = w.unit, tiles.scores
    for i in range(len(COARSE)):
        h = COARSE[i]
        for j in range(64 // h):
            left = C - 2 * h - 2 * h * j
            k_block = u.coarse[i][:, j, left : left + C]
            q_block = u.coarse[i][:, j, 256 - 2 * h : 256 - h]
            there = s[:, 2 * h * j + h : 2 * h * j + 2 * h]
            nisa.nc_matmul(dst=there, stationary=k_block, moving=q_block, accumulate=j > 0)
    if tiles.fast:
        near = s[:, C : 2 * C]
        nisa.nc_matmul(dst=near, stationary=u.near[:, 0:C], moving=u.near[:, C : 2 * C], accumulate=False)
    else:
        for i in range(len(FINE)):
            h = FINE[i]
            right = u.fine.ap(pattern=[[3 * C, tiles.K], [2 * h, 64 // h], [1, h]], offset=i * C + h)
            there = s[:, C + 64 * i : C + 64 * i + 64].reshape_dim(1, (64 // h, h))
            nisa.nc_matmul(dst=there, stationary=u.fine[:, i, :], moving=right, accumulate=False)
        # s = t, then level 1.
        there = s[:, C + 192 : BANK]
        nisa.nc_matmul(dst=there, stationary=u.kq[:, 0:C], moving=u.kq[:, C : 2 * C + 64], accumulate=False)
    nisa.nc_matmul(dst=tiles.add, stationary=u.k_rest, moving=w.v, accumulate=False)


def mask(tiles, constants, w, scale):
    u, s = w.unit, tiles.scores
    masks = constants[1]
    nisa.activation(dst=u.scores[0][:, 16:C], op=nl.copy, data=s[:, 16:C])
    if tiles.fast:
        nisa.tensor_tensor(dst=u.scores[1], data1=s[:, C : 2 * C], data2=masks, op=nl.multiply)
    else:
        for i in range(4):
            h = (*FINE, 1)[i]
            first = C + 64 * i if h > 1 else BANK - 64
            met = s[:, first : first + 64].reshape_dim(1, (64 // h, h))
            allowed = masks[:, 64 * i : 64 * i + 64].reshape_dim(1, (64 // h, h))
            there = u.scores[1 + i].ap(pattern=[[C, C], [2 * h, 64 // h], [1, h]], offset=h)
            nisa.tensor_tensor(dst=there, data1=met, data2=allowed, op=nl.multiply)
        diagonal = s[:, C + 192 : 2 * C + 192]
        nisa.tensor_tensor(dst=u.scores[5], data1=diagonal, data2=masks[:, 256 : 256 + C], op=nl.multiply)


def output(tiles, constants, w, scale):
    u = w.unit
    for i in range(len(u.scores)):
        nisa.nc_matmul(dst=tiles.out, stationary=u.scores[i], moving=w.v, accumulate=i > 0)
    nisa.nc_matmul(dst=tiles.out, stationary=u.q_b, moving=tiles.state_mm[w.head][w.odd], accumulate=True)


def decay_state(tiles, constants, w, scale):
    nisa.activation(dst=w.unit.decayed, op=nl.copy, data=tiles.state[w.head], scale=w.unit.total)


def update_state(tiles, constants, w, scale):
    state = tiles.state[w.head]
    nisa.tensor_tensor(dst=state, data1=w.unit.decayed, data2=tiles.add, op=nl.add)


def finish(tiles, constants, w, scale):
    nisa.activation(dst=tiles.state_mm[w.head][1 - w.odd], op=nl.copy, data=tiles.state[w.head])
    nisa.activation(dst=w.chunk.o[:, w.head, :], op=nl.copy, data=tiles.out, scale=scale)


# (how many units behind the first stage, stage), in the order in which a step issues them: the oldest unit first, since
# it frees the memory that a younger one takes.
PIPELINE = (
    (4, output),
    (4, finish),
    (3, mask),
    (3, update_state),
    (2, score),
    (2, decay_state),
    (1, exponents),
    (1, multiply),
    (0, sum_gates),
)
