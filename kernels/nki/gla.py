"""Chunked gated linear attention on Trainium2, forward: exact for every gate in [-128, 0].

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

A unit is a chunk of C = 128 tokens of one head. Tokens lie on the partitions where they are summed over, key channels
([K, C]) where those are. Every exponent is a sum of gates over an interval of tokens, which the tensor engine makes by
multiplying g [C, K] with a constant 0/1 matrix; a sum of numbers <= 0 is <= 0: nothing overflows, nothing cancels.
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

Cycles of a unit of 128/128 in bfloat16, as simulator/cost.py prices them (estimates, as all times here):

    PE    q^T, k^T 256; gate sums 2176 (float32 against 0/1: 2 a column); scores 832; scores^T v 768; q S, k^T v 256
    ACT   q^T, k^T out of PSUM 256; exponentials 1152; scores 112; e^{b_C} S, S to bfloat16, o out of PSUM 384
    DVE   P_h, k e^.., q e^b 576 (16 bits: two a cycle); masks 384; S + k^T v 128

A unit goes through stages that lie several units apart (PIPELINE): an engine in its recorded order hardly waits for
another one.

    SBUF, bytes a partition, 128/128, bfloat16     PSUM banks (8)
    constants                 5.9 K                  gate sums            2
    chunks' q k v g o         6.0 K a head           transposes, b_C - b  1
    units on their way       14 K                    scores               1
    states                    1.0 K a head           o                    3
                                                     k^T v                1

How it got here, T_sched a unit of 128/128 with four heads (T_max 1.79):
  3.39  stages in the order of the equation, up to four units apart
  2.99  the oldest unit first, each engine's part of a step by itself
  2.08  the order and the lags found by a search over them, with as many copies of a tile as they need
Masks on the operands instead of the scores, and levels of 8 to 1 as one sum in PSUM, are wrong: pairs of other blocks
come in. Each level's scores^T v costs less than adding up the scores on DVE.

Limits: K <= 128, V <= 512; ops.py splits what is larger. float32 inputs are multiplied in float32, at a quarter of the
speed, and their gates summed in four parts, one unit after the other.
"""

from ringtide.kernels.nki.backend import nisa, nki, nl
from ringtide.kernels.nki.units import (
    BANK,
    COLUMN,
    TOKEN,
    C,
    Ring,
    at_once,
    chunk_copies,
    groups,
    in_parts,
    level,
    load,
    run_down,
    shares,
    side_by_side,
    split_turns,
    sum_from,
    sum_to,
    turns_of,
    window,
)

COARSE, FINE = (64, 32, 16), (8, 4, 2)  # levels; 1 stands apart: there k does not decay
TURN = 32  # units of a turn of the loop over a long sequence, at least


SELF = TOKEN == COLUMN  # [s, t]: s = t
UNTIL = TOKEN <= COLUMN  # [token, column]: up to the column's token
# The gates that each exponent adds up: 128 columns a level, 64 of level 1, 128 of b.
INTERVALS = side_by_side([level(h) for h in (*COARSE, *FINE)] + [SELF[:, 1::2], UNTIL])
FAST_INTERVALS = side_by_side([level(h) for h in COARSE] + [(COLUMN // 16 * 16 < TOKEN) & UNTIL, UNTIL])
AFTER = side_by_side([TOKEN > COLUMN])


def _right(h):
    """0/1 [s, 64 t]: s in the left half of the block of 2 h of which t is in the right one."""
    return ((TOKEN // (2 * h) == COLUMN // (2 * h)) & (TOKEN % (2 * h) < h))[:, COLUMN[0] % (2 * h) >= h]


MASKS = side_by_side([_right(h) for h in (*FINE, 1)] + [SELF])
FAST_MASKS = side_by_side([(TOKEN // 16 == COLUMN // 16) & UNTIL])


@nki.jit
def gla_forward(q, k, v, g, h0, scale, fast=False):
    """(o, final state). q, k [B, T, N, K], v [B, T, N, V] of one dtype, g [B, T, N, K] float32 in [-128, 0],
    h0 [B, N, K, V] float32. Two cores take half of the heads each; of an odd N both compute the middle one, and the
    results have it twice."""
    batch, length, heads, K = q.shape
    V = v.shape[3]
    core, cores, share = shares(heads)
    o = nl.ndarray((batch, length, share * cores, V), dtype=v.dtype, buffer=nl.shared_hbm)
    final = nl.ndarray((batch, share * cores, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    parts = groups(share)
    tiles = Tiles(parts, K, V, v.dtype, scale, fast)
    for b in range(batch):
        for first, count in parts:
            group = (b, core * (heads - share) + first, core * share + first, count)
            run_group(tiles, (q, k, v, g, o), h0, final, group)
    return o, final


class Chunk(nl.NKIObject):
    """A chunk's inputs and its output in SBUF, token-major, all heads of the group: one DMA each."""

    def __init__(self, heads, K, V, dtype):
        self.q = nl.ndarray((C, heads, K), dtype=dtype)
        self.k = nl.ndarray((C, heads, K), dtype=dtype)
        self.v = nl.ndarray((C, heads, V), dtype=dtype)
        self.g = nl.ndarray((C, heads, K), dtype=nl.float32)
        self.o = nl.ndarray((C, heads, V), dtype=dtype)


class Tiles(nl.NKIObject):
    """All on-chip memory of the kernel, allocated once. What is 0 in `coarse` and `met` is 0 for good."""

    def __init__(self, parts, K, V, dtype, scale, fast):
        self.K, self.V, self.dtype, self.scale, self.fast = K, V, dtype, scale, fast
        line = PIPELINE if dtype != nl.float32 else at_once(PIPELINE)
        least, most = parts[0][1], parts[len(parts) - 1][1]
        self.pipeline = line
        self.chunks = [Chunk(most, K, V, dtype) for _ in range(chunk_copies(line, least))]
        self.state = [nl.ndarray((K, V), dtype=nl.float32) for _ in range(most)]
        self.rounded = [[nl.ndarray((K, V), dtype=dtype) for _ in range(2)] for _ in range(most)]  # even, odd chunks
        self.intervals = in_parts(FAST_INTERVALS if fast else INTERVALS, dtype)
        self.after = in_parts(AFTER, dtype)
        masks = FAST_MASKS if fast else MASKS
        self.masks = nl.ndarray(masks.shape, dtype=nl.float32)
        nisa.dma_copy(dst=self.masks, src=nl.shared_constant(masks))

        sums = self.intervals.shape[2]
        self.kq = Ring(line, take_turned, score, (K, 2 * C + 64), dtype)  # k^T | q^T | q e^g at odd t
        self.rest = Ring(line, take_turned, multiply, (C, K), dtype)  # e^(b_C - b)
        self.decay = Ring(line, exponents, multiply, (K, sums), dtype)  # e^(gate sums)
        self.total = Ring(line, exponents, decay_state, (K, 1), nl.float32)  # e^(b_C)
        self.k_rest = Ring(line, multiply, add_to_state, (C, K), dtype)  # k e^(b_C - b)
        self.q_b = Ring(line, multiply, output, (K, C), dtype)  # q e^b
        # A block's k with zeros on both sides: 128 columns around it put it at its own rows of the scores; then its q.
        self.coarse = [Ring(line, multiply, score, (K, 64 // h, 256 - h), dtype) for h in COARSE]
        if fast:
            self.grow = Ring(line, exponents, multiply, (K, C), dtype)  # e^-(sum of g from the block's start)
            self.near = Ring(line, multiply, score, (K, 2 * C), dtype)  # k and q towards it
        else:
            self.fine = Ring(line, multiply, score, (K, 3, C), dtype)  # P_h
        self.met = [Ring(line, take_coarse, output, (C, C), dtype)]  # scores [s, t]: the coarse levels, then each other
        for _ in range(1 if fast else 5):
            self.met.append(Ring(line, mask, output, (C, C), dtype))
        self.decayed = Ring(line, decay_state, update_state, (K, V), nl.float32)  # e^(b_C) S
        for ring in (*self.coarse, *self.met):
            for x in ring.copies:
                nisa.memset(dst=x, value=0.0, engine=nisa.engine.gpsimd)

        self.sums = Ring(line, sum_gates, exponents, (K, BANK), nl.float32, nl.psum)
        self.last_sums = Ring(line, sum_gates, exponents, (K, sums - BANK), nl.float32, nl.psum)
        self.turned = Ring(line, turn_around, take_turned, (C, BANK), nl.float32, nl.psum)
        self.scores = Ring(line, score, mask, (C, BANK), nl.float32, nl.psum)  # take_coarse comes before mask
        self.out = Ring(line, output, finish, (C, V), nl.float32, nl.psum)
        self.add = Ring(line, add_to_state, update_state, (K, V), nl.float32, nl.psum)

    def turned_kq(self, unit):
        """k^T | q^T as they come out of the tensor engine, [K, 2 C]."""
        if self.dtype == nl.float32:
            return self.turned.of(unit)[0 : self.K, C : 3 * C]
        return self.turned.of(unit)[0 : self.K, C : 2 * C].view(self.dtype)


# --- a group of heads, from its first token to its last --------------------------------------------------------------


def run_group(tiles, tensors, h0, final, group):
    """Heads (sequence, first, first of the results, count) of tensors (q, k, v, g, o)."""
    b, of, into, count = group
    length = tensors[0].shape[1]
    for i in range(count):
        nisa.dma_copy(dst=tiles.state[i], src=h0[b, of + i])
        nisa.activation(dst=tiles.rounded[i][0], op=nl.copy, data=tiles.state[i])
    turns, each = turns_of(length, count, TURN)
    if turns > 0:
        loop = split_turns(tensors, turns, each)

        def turn(i):
            run_chunks(tiles, loop, group, 0, each * C, i)

        nl.fori_loop(0, turns, turn)
    run_chunks(tiles, tensors, group, turns * each * C, length, None)
    for i in range(count):
        nisa.dma_copy(dst=final[b, into + i], src=tiles.state[i])


def run_chunks(tiles, tensors, group, start, end, turn):
    """Tokens start to end."""
    b, of, into, count = group
    chunks = (end - start + C - 1) // C

    def load_chunk(i):
        chunk, t = tiles.chunks[i % len(tiles.chunks)], start + i * C
        load((chunk.q, chunk.k, chunk.v, chunk.g), tensors, b, t, min(end - t, C), of, count, turn)

    def store_chunk(i):
        t = start + i * C
        rows = min(end - t, C)
        o = tiles.chunks[i % len(tiles.chunks)].o[0:rows, 0:count, :]
        nisa.dma_copy(dst=window(tensors[4], b, t, rows, into, count, turn), src=o)

    run_down(tiles.pipeline, tiles, chunks, (0, 1), count, load_chunk, store_chunk)


# --- the stages of a unit --------------------------------------------------------------------------------------------


def turn_around(u, t):
    kq, k, q = t.turned_kq(u), u.chunk.k[:, u.head, :], u.chunk.q[:, u.head, :]
    nisa.nc_transpose(dst=kq[:, 0:C], data=k, engine=nisa.engine.tensor)
    nisa.nc_transpose(dst=kq[:, C : 2 * C], data=q, engine=nisa.engine.tensor)
    sum_from(t.turned.of(u)[:, 0 : t.K], u.chunk.g[:, u.head, :], t.after, 0, C)


def take_turned(u, t):
    nisa.activation(dst=t.kq.of(u)[:, 0 : 2 * C], op=nl.copy, data=t.turned_kq(u))
    nisa.activation(dst=t.rest.of(u), op=nl.exp, data=t.turned.of(u)[:, 0 : t.K])


def sum_gates(u, t):
    sums, last, g = t.sums.of(u), t.last_sums.of(u), u.chunk.g[:, u.head, :]
    sum_to(sums, g, t.intervals, 0, BANK)
    sum_to(last, g, t.intervals, BANK, BANK + last.shape[1])


def exponents(u, t):
    sums, last, decay = t.sums.of(u), t.last_sums.of(u), t.decay.of(u)
    n = last.shape[1]
    nisa.activation(dst=decay[:, 0:BANK], op=nl.exp, data=sums)
    nisa.activation(dst=decay[:, BANK : BANK + n], op=nl.exp, data=last)
    nisa.activation(dst=t.total.of(u), op=nl.exp, data=last[:, n - 1 : n])
    if t.fast:
        nisa.activation(dst=t.grow.of(u), op=nl.exp, data=sums[:, 3 * C : BANK], scale=-1.0)


def multiply(u, t):
    kq, decay = t.kq.of(u), t.decay.of(u)
    row, sums = kq.shape[1], decay.shape[1]
    for i in range(3):
        h = COARSE[i]
        n = 64 // h
        # Left halves from k^T, right halves from q^T, which lies C columns further.
        both = kq.ap(pattern=[[row, t.K], [2 * h, n], [C + h, 2], [1, h]])
        by = decay[:, i * C : (i + 1) * C].reshape_dim(1, (n, 2, h))
        there = t.coarse[i].of(u).ap(pattern=[[n * (256 - h), t.K], [256 - h, n], [C, 2], [1, h]], offset=C - 2 * h)
        nisa.tensor_tensor(dst=there, data1=both, data2=by, op=nl.multiply)
    if t.fast:
        near, by = t.near.of(u), decay[:, 3 * C : 4 * C]
        nisa.tensor_tensor(dst=near[:, 0:C], data1=kq[:, 0:C], data2=t.grow.of(u), op=nl.multiply)
        nisa.tensor_tensor(dst=near[:, C : 2 * C], data1=kq[:, C : 2 * C], data2=by, op=nl.multiply)
    else:
        for i in range(3):
            h = FINE[i]
            both = kq.ap(pattern=[[row, t.K], [2 * h, 64 // h], [C + h, 2], [1, h]])
            by = decay[:, (3 + i) * C : (4 + i) * C].reshape_dim(1, (64 // h, 2, h))
            there = t.fine.of(u)[:, i, :].reshape_dim(1, (64 // h, 2, h))
            nisa.tensor_tensor(dst=there, data1=both, data2=by, op=nl.multiply)
        odd, by = kq.ap(pattern=[[row, t.K], [2, 64]], offset=C + 1), decay[:, 6 * C : 6 * C + 64]
        nisa.tensor_tensor(dst=kq[:, 2 * C : row], data1=odd, data2=by, op=nl.multiply)
    k = u.chunk.k[:, u.head, :]
    nisa.tensor_tensor(dst=t.k_rest.of(u), data1=k, data2=t.rest.of(u), op=nl.multiply)
    by = decay[:, sums - C : sums]
    nisa.tensor_tensor(dst=t.q_b.of(u), data1=kq[:, C : 2 * C], data2=by, op=nl.multiply)


def score(u, t):
    s, kq = t.scores.of(u), t.kq.of(u)
    for i in range(3):
        h, block = COARSE[i], t.coarse[i].of(u)
        for j in range(64 // h):
            first = C - 2 * h - 2 * h * j
            keys, queries = block[:, j, first : first + C], block[:, j, 256 - 2 * h : 256 - h]
            there = s[:, 2 * h * j + h : 2 * h * j + 2 * h]
            nisa.nc_matmul(dst=there, stationary=keys, moving=queries, accumulate=j > 0)
    if t.fast:
        near = t.near.of(u)
        there = s[:, C : 2 * C]
        nisa.nc_matmul(dst=there, stationary=near[:, 0:C], moving=near[:, C : 2 * C], accumulate=False)
    else:
        for i in range(3):
            h, fine = FINE[i], t.fine.of(u)
            right = fine.ap(pattern=[[3 * C, t.K], [2 * h, 64 // h], [1, h]], offset=i * C + h)
            there = s[:, C + 64 * i : C + 64 * i + 64].reshape_dim(1, (64 // h, h))
            nisa.nc_matmul(dst=there, stationary=fine[:, i, :], moving=right, accumulate=False)
        # s = t, then level 1.
        there = s[:, C + 192 : BANK]
        nisa.nc_matmul(dst=there, stationary=kq[:, 0:C], moving=kq[:, C : 2 * C + 64], accumulate=False)


def take_coarse(u, t):
    nisa.activation(dst=t.met[0].of(u)[:, 16:C], op=nl.copy, data=t.scores.of(u)[:, 16:C])


def mask(u, t):
    s = t.scores.of(u)
    if t.fast:
        nisa.tensor_tensor(dst=t.met[1].of(u), data1=s[:, C : 2 * C], data2=t.masks, op=nl.multiply)
    else:
        for i in range(4):
            h = (*FINE, 1)[i]
            first = C + 64 * i if h > 1 else BANK - 64
            scores = s[:, first : first + 64].reshape_dim(1, (64 // h, h))
            allowed = t.masks[:, 64 * i : 64 * i + 64].reshape_dim(1, (64 // h, h))
            there = t.met[1 + i].of(u).ap(pattern=[[C, C], [2 * h, 64 // h], [1, h]], offset=h)
            nisa.tensor_tensor(dst=there, data1=scores, data2=allowed, op=nl.multiply)
        diagonal, allowed = s[:, C + 192 : 2 * C + 192], t.masks[:, 256 : 256 + C]
        nisa.tensor_tensor(dst=t.met[5].of(u), data1=diagonal, data2=allowed, op=nl.multiply)


def output(u, t):
    v, out = u.chunk.v[:, u.head, :], t.out.of(u)
    for i in range(len(t.met)):
        nisa.nc_matmul(dst=out, stationary=t.met[i].of(u), moving=v, accumulate=i > 0)
    nisa.nc_matmul(dst=out, stationary=t.q_b.of(u), moving=t.rounded[u.head][u.odd], accumulate=True)


def finish(u, t):
    nisa.activation(dst=u.chunk.o[:, u.head, :], op=nl.copy, data=t.out.of(u), scale=t.scale)


def add_to_state(u, t):
    v = u.chunk.v[:, u.head, :]
    nisa.nc_matmul(dst=t.add.of(u), stationary=t.k_rest.of(u), moving=v, accumulate=False)


def decay_state(u, t):
    nisa.activation(dst=t.decayed.of(u), op=nl.copy, data=t.state[u.head], scale=t.total.of(u))


def update_state(u, t):
    nisa.tensor_tensor(dst=t.state[u.head], data1=t.decayed.of(u), data2=t.add.of(u), op=nl.add)


def round_state(u, t):
    nisa.activation(dst=t.rounded[u.head][1 - u.odd], op=nl.copy, data=t.state[u.head])


# (how many units behind the first stage, stage), in the order in which a step issues them: found by trying orders
# against the schedule. A state is updated and rounded before the next unit, maybe of the same head, reads it.
PIPELINE = (
    (2, take_coarse),
    (2, mask),
    (0, sum_gates),
    (3, output),
    (3, round_state),
    (5, finish),
    (2, update_state),
    (0, turn_around),
    (0, exponents),
    (0, take_turned),
    (1, multiply),
    (1, score),
    (1, decay_state),
    (1, add_to_state),
)
