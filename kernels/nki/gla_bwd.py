"""Chunked gated linear attention on Trainium2, backward: all gradients, exact for every gate in [-128, 0].

With D the gradient of the state, from the last chunk to the first (names and units as in gla.py; o = S^T q here, all
results are scaled at the end, and D starts from dhT / scale):

    dA [t, s] = do_t . v_s for s <= t, otherwise 0
    dv [s]  = A^T do + (k e^{b_C - b}) D
    dq [t]  = sum over levels of E_h * (dA_h (k E_h)) + dA_tt k_t + e^b * (S_in do)         E_h: e^(sums of level h)
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
the gates, transposed, take it to dg: no pair of tokens is counted twice, so nothing has to cancel. (The usual reverse
sum of q dq - k dk cancels pairs; its error was 2e-2 against 4e-3 in bfloat16, 2e-6 against 1e-7 in float32.) The
gradient of e^{b_C}, the row sums of S_in D, is the diagonal of S_in D^T; a matmul with ones spreads it over the tokens.

Stages lie several units apart, as in gla.py. For 128/128 in bfloat16, us a unit by simulator/schedule.py: T_max 5.15
(PE; DVE 4.67, ACT 4.32), of which 0.5 for the states; T_sched 8.0, and 12.9 before the search for an order.

    SBUF, bytes a partition, 128/128, bfloat16     PSUM banks, each filled and emptied several times a unit
    constants                 9.6 K                  0  k^T, q^T; last gate sums; D to dk; e^{b_C}; last exponents
    chunks, in and out         13 K a head           1  v^T, do^T; S and D turned round
    units on their way       44 K                    2  gate sums; [dk | dq]_h
    D and its roundings       1.0 K a head           3  gate sums; [dk | dq]_h; S to dq
                                                     4  P_h turned round; Z; s = t of A; exponents' gradients
                                                     5  P_h turned round; A; exponents' gradients
                                                     6  dk, dq, dg
                                                     7  dv; what D gains

Limits: K <= 128, V <= 256; ops.py splits what is larger.
"""

from ringtide.kernels.nki import gla_states
from ringtide.kernels.nki.backend import nisa, nki, nl
from ringtide.kernels.nki.gla_states import state_window, store_states
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
    sum_to,
    turns_of,
    window,
)

LEVELS = (64, 32, 16, 8, 4, 2, 1)
B, REST, SUMS = 7 * C, 8 * C, 9 * C  # columns: b, b_C - b
TURN = 16  # units of a turn of the loop over a long sequence, at least


# The gates that each exponent adds up: 128 columns a level, then b, then b_C - b; for each 128 of them, transposed.
INTERVALS = side_by_side([level(h) for h in LEVELS] + [TOKEN <= COLUMN, TOKEN > COLUMN])
ADJOINT = side_by_side([level(h).T for h in LEVELS] + [TOKEN >= COLUMN, TOKEN < COLUMN])


def _apart(h):
    """0/1 [r, c]: in different halves of the same block of 2 h."""
    return (TOKEN // (2 * h) == COLUMN // (2 * h)) & (TOKEN // h != COLUMN // h)


MASKS = side_by_side([_apart(h) for h in LEVELS] + [TOKEN == COLUMN])


@nki.jit
def gla_backward(q, k, v, g, h0, do, dhT, scale):
    """(dq, dk, dv, dg, dh0) of <do, o> + <dhT, final state>, arguments as of gla.gla_forward; scale is not 0.

    do [B, T, N, V] in the dtype of v, dhT [B, N, K, V] float32. dg and dh0 are float32. Two cores as in gla_forward.
    """
    batch, length, heads, K = q.shape
    V = v.shape[3]
    core, cores, share = shares(heads)
    wide = share * cores
    dq = nl.ndarray((batch, length, wide, K), dtype=q.dtype, buffer=nl.shared_hbm)
    dk = nl.ndarray((batch, length, wide, K), dtype=q.dtype, buffer=nl.shared_hbm)
    dv = nl.ndarray((batch, length, wide, V), dtype=q.dtype, buffer=nl.shared_hbm)
    dg = nl.ndarray((batch, length, wide, K), dtype=nl.float32, buffer=nl.shared_hbm)
    dh0 = nl.ndarray((batch, wide, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    parts = groups(share)
    most = parts[len(parts) - 1][1]
    states = nl.ndarray(((length + C - 1) // C, K, most, V), dtype=q.dtype, buffer=nl.private_hbm)
    tiles = Tiles(parts, K, V, q.dtype, scale)
    for b in range(batch):
        for first, count in parts:
            group = (b, core * (heads - share) + first, core * share + first, count)
            store_states(tiles.states, (k, v, g), h0, states, group)
            run_group(tiles, (q, k, v, do, g), (dq, dk, dv, dg), dhT, dh0, states, group)
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


class Tiles(nl.NKIObject):
    """All on-chip memory of the kernel, allocated once, and its constants. What is 0 in `a` and `y` is 0 for good."""

    def __init__(self, parts, K, V, dtype, scale):
        self.K, self.V, self.dtype, self.scale = K, V, dtype, scale
        self.parts = [min(C, V - at) for at in range(0, V, C)]  # value channels that are turned round at a time
        pieces = len(self.parts)
        line = PIPELINE if dtype != nl.float32 else at_once(PIPELINE)
        least, most = parts[0][1], parts[len(parts) - 1][1]
        self.pipeline = line
        self.chunks = [Chunk(most, K, V, dtype) for _ in range(chunk_copies(line, least))]
        self.state = [nl.ndarray((K, V), dtype=nl.float32) for _ in range(most)]  # S going forward, D going back
        self.rounded = [[nl.ndarray((K, V), dtype=dtype) for _ in range(2)] for _ in range(most)]  # D: even, odd chunks
        self.turn = nl.ndarray((1, 1), dtype=nl.int32)
        self.banks = [nl.ndarray((C, BANK), dtype=nl.float32, buffer=nl.psum) for _ in range(8)]

        self.kq = Ring(line, turn_inputs, differentiate_sums, (K, 2, C), dtype)  # k^T | q^T
        self.vdo = Ring(line, turn_inputs, meet_states, (C, pieces, 2, C), dtype)  # v^T | do^T
        self.decay = Ring(line, sum_gates, meet_states, (K, SUMS), dtype)  # e^(gate sums)
        self.total = Ring(line, sum_gates, next_gradient, (K, 1), nl.float32)  # e^(b_C)
        self.p = Ring(line, multiply, score, (K, 7, C), dtype)  # P_h
        self.q_b = Ring(line, multiply, turn_products, (K, C), dtype)  # q e^b
        self.k_rest = Ring(line, multiply, values, (K, C), dtype)  # k e^(b_C - b)
        self.pt = Ring(line, turn_products, meet_keys, (C, 7, K), dtype)  # P_h turned round
        self.q_bt = Ring(line, turn_products, next_gradient, (C, K), dtype)
        self.z = Ring(line, meet_values, mask_values, (C, 2, C), dtype)  # do_r . v_c | v_r . do_c
        self.zm = Ring(line, mask_values, meet_keys, (C, 7, C), dtype)  # mask * Z
        self.diagonal = Ring(line, mask_values, add_up, (C, C), dtype)  # its r = c
        self.a = Ring(line, score, values, (C, 8, C), dtype)  # mask * A [t, s], the last with s = t
        self.y = Ring(line, meet_keys, add_up, (K, 8, 2, C), dtype)  # what adds up to dk | dq; the last of the states
        self.st = Ring(line, turn_states, meet_states, (C, pieces, K), dtype)  # S and D turned round
        self.dt = Ring(line, turn_states, meet_states, (C, pieces, K), dtype)
        self.through = Ring(line, meet_states, gates, (K, K), nl.float32)  # diagonal: e^(b_C) sum over v of S D
        self.sums = Ring(line, differentiate_sums, turn_sums, (K, 9, C), dtype)  # gradients of the gate sums
        self.sums_t = Ring(line, turn_sums, gates, (C, 9, K), dtype)
        self.decayed = Ring(line, next_gradient, next_gradient, (K, V), nl.float32)  # e^(b_C) D
        for ring in (self.a, self.y):
            for x in ring.copies:
                nisa.memset(dst=x, value=0.0, engine=nisa.engine.gpsimd)

        self.intervals = in_parts(INTERVALS, dtype)
        self.adjoint = nl.ndarray((C, 9, C), dtype=dtype)
        self.masks = nl.ndarray((C, 8, C), dtype=dtype)
        self.ones = nl.ndarray((C, C), dtype=nl.float32)
        nisa.dma_copy(dst=self.adjoint.reshape((C, SUMS)), src=nl.shared_constant(ADJOINT))
        nisa.dma_copy(dst=self.masks.reshape((C, 8 * C)), src=nl.shared_constant(MASKS))
        nisa.memset(dst=self.ones, value=1.0, engine=nisa.engine.gpsimd)
        self.identity = self.masks[:, 7, :]
        after = self.intervals[:, :, REST - 1 : SUMS]  # all gates, then those after each column's token
        self.states = gla_states.Tiles(K, V, dtype, self.chunks, self.state, self.banks, after)

    def bank(self, number, rows, columns, at=0):
        """float32 [rows, columns] of a bank, from column `at` on."""
        return self.banks[number][0:rows, at : at + columns]

    def narrow(self, number, rows, columns, at=0):
        """As `bank`, in the dtype of the operands."""
        if self.dtype == nl.float32:
            return self.bank(number, rows, columns, at)
        return self.banks[number][0:rows, at : at + (columns + 1) // 2].view(self.dtype)[:, 0:columns]


# --- a group of heads, from its last token to its first --------------------------------------------------------------


def run_group(tiles, tensors, results, dhT, dh0, states, group):
    """tensors: (q, k, v, do, g). results: (dq, dk, dv, dg)."""
    b, of, into, count = group
    length = tensors[0].shape[1]
    last = (length + C - 1) // C - 1
    for i in range(count):
        nisa.dma_copy(dst=tiles.state[i], src=dhT[b, of + i])
        d = tiles.state[i]
        nisa.activation(dst=d, op=nl.copy, data=d, scale=1.0 / tiles.scale)
        nisa.activation(dst=tiles.rounded[i][last % 2], op=nl.copy, data=d)
    turns, each = turns_of(length, count, TURN)
    backward_chunks(tiles, tensors, results, states, group, turns * each * C, length, None)
    if turns > 0:
        ins, outs = split_turns(tensors, turns, each), split_turns(results, turns, each)
        entering = states.slice(0, 0, turns * each).reshape_dim(0, (turns, each))
        nisa.memset(dst=tiles.turn, value=turns - 1, engine=nisa.engine.vector)

        def turn(i):
            backward_chunks(tiles, ins, outs, entering, group, 0, each * C, tiles.turn)
            nisa.tensor_scalar(dst=tiles.turn, data=tiles.turn, op0=nl.subtract, operand0=1.0)

        nl.fori_loop(0, turns, turn)
    for i in range(count):
        d = tiles.state[i]
        nisa.activation(dst=d, op=nl.copy, data=d, scale=tiles.scale)
        nisa.dma_copy(dst=dh0[b, into + i], src=d)


def backward_chunks(tiles, tensors, results, states, group, start, end, turn):
    """Tokens end to start."""
    b, of, into, count = group
    chunks, copies = (end - start + C - 1) // C, len(tiles.chunks)

    def load_chunk(i):
        chunk, t = tiles.chunks[i % copies], start + (chunks - 1 - i) * C
        load((chunk.q, chunk.k, chunk.v, chunk.do, chunk.g), tensors, b, t, min(end - t, C), of, count, turn)
        nisa.dma_copy(dst=chunk.states[:, 0:count, :], src=state_window(states, t // C, count, turn))

    def store_chunk(i):
        chunk, t = tiles.chunks[i % copies], start + (chunks - 1 - i) * C
        rows = min(end - t, C)
        made = (chunk.dq, chunk.dk, chunk.dv, chunk.dg)
        for x in range(4):
            there = window(results[x], b, t, rows, into, count, turn)
            nisa.dma_copy(dst=there, src=made[x][0:rows, 0:count, :])

    odd = (start // C + chunks - 1) % 2
    run_down(tiles.pipeline, tiles, chunks, (odd, 1 - odd), count, load_chunk, store_chunk)


# --- the stages of a unit --------------------------------------------------------------------------------------------


def halves(x, level, columns, first, apart):
    """[rows, blocks, 2, h] of x's free elements: left halves from `first` on, right halves `apart` columns further."""
    h = LEVELS[level]
    return x.ap(pattern=[[columns, x.shape[0]], [2 * h, 64 // h], [apart + h, 2], [1, h]], offset=first)


def left(x, level, columns, first):
    """[rows, blocks, h]: the left halves."""
    h = LEVELS[level]
    return x.ap(pattern=[[columns, x.shape[0]], [2 * h, 64 // h], [1, h]], offset=first)


def turn_inputs(u, t):
    K = t.K
    kq = t.narrow(0, K, 2 * C)
    nisa.nc_transpose(dst=kq[:, 0:C], data=u.chunk.k[:, u.head, :], engine=nisa.engine.tensor)
    nisa.nc_transpose(dst=kq[:, C : 2 * C], data=u.chunk.q[:, u.head, :], engine=nisa.engine.tensor)
    nisa.activation(dst=t.kq.of(u).reshape((K, 2 * C)), op=nl.copy, data=kq)
    for j in range(len(t.parts)):
        n = t.parts[j]
        part = t.narrow(1, n, 2 * C, 2 * C * j)
        v, do = u.chunk.v[:, u.head, j * C : j * C + n], u.chunk.do[:, u.head, j * C : j * C + n]
        nisa.nc_transpose(dst=part[:, 0:C], data=v, engine=nisa.engine.tensor)
        nisa.nc_transpose(dst=part[:, C : 2 * C], data=do, engine=nisa.engine.tensor)
        nisa.activation(dst=t.vdo.of(u)[0:n, j, :, :], op=nl.copy, data=part.reshape_dim(1, (2, C)))


def sum_gates(u, t):
    K, g = t.K, u.chunk.g[:, u.head, :]
    sums = (t.bank(2, K, BANK), t.bank(3, K, BANK), t.bank(0, K, C, 3 * C))
    for i in range(3):
        first = i * BANK
        n = sums[i].shape[1]
        sum_to(sums[i], g, t.intervals, first, first + n)
        nisa.activation(dst=t.decay.of(u)[:, first : first + n], op=nl.exp, data=sums[i])
    nisa.activation(dst=t.total.of(u), op=nl.exp, data=sums[1][:, BANK - 1 : BANK])


def multiply(u, t):
    for i in range(7):
        both, decay = halves(t.kq.of(u), i, 2 * C, 0, C), halves(t.decay.of(u), i, SUMS, i * C, 0)
        nisa.tensor_tensor(dst=halves(t.p.of(u), i, 7 * C, i * C, 0), data1=both, data2=decay, op=nl.multiply)
    nisa.tensor_tensor(dst=t.q_b.of(u), data1=t.kq.of(u)[:, 1, :], data2=t.decay.of(u)[:, B:REST], op=nl.multiply)
    nisa.tensor_tensor(dst=t.k_rest.of(u), data1=t.kq.of(u)[:, 0, :], data2=t.decay.of(u)[:, REST:SUMS], op=nl.multiply)


def turn_products(u, t):
    K = t.K
    for first, n, number in ((0, 4, 4), (4, 3, 5)):
        pt = t.narrow(number, C, n * K)
        for i in range(n):
            part = pt[:, i * K : (i + 1) * K]
            nisa.nc_transpose(dst=part, data=t.p.of(u)[:, first + i, :], engine=nisa.engine.tensor)
        nisa.activation(dst=t.pt.of(u)[:, first : first + n, :], op=nl.copy, data=pt.reshape_dim(1, (n, K)))
    q_bt = t.narrow(0, C, K, 2 * C)
    nisa.nc_transpose(dst=q_bt, data=t.q_b.of(u), engine=nisa.engine.tensor)
    nisa.activation(dst=t.q_bt.of(u), op=nl.copy, data=q_bt)


def meet_values(u, t):
    """Z: both orders of v and do."""
    z = t.bank(4, C, 2 * C)
    for side in range(2):
        for j in range(len(t.parts)):
            rows, columns = t.vdo.of(u)[0 : t.parts[j], j, 1 - side, :], t.vdo.of(u)[0 : t.parts[j], j, side, :]
            there = z[:, side * C : (side + 1) * C]
            nisa.nc_matmul(dst=there, stationary=rows, moving=columns, accumulate=j > 0)
    nisa.activation(dst=t.z.of(u), op=nl.copy, data=z.reshape_dim(1, (2, C)))


def mask_values(u, t):
    for i in range(7):
        met, allowed = halves(t.z.of(u), i, 2 * C, 0, C), halves(t.masks, i, 8 * C, i * C, 0)
        nisa.tensor_tensor(dst=halves(t.zm.of(u), i, 7 * C, i * C, 0), data1=met, data2=allowed, op=nl.multiply)
    nisa.tensor_tensor(dst=t.diagonal.of(u), data1=t.z.of(u)[:, 1, :], data2=t.identity, op=nl.multiply)


def score(u, t):
    for i in range(7):
        there = t.bank(5, C, 64, 64 * i).reshape_dim(1, (64 // LEVELS[i], LEVELS[i]))
        keys = left(t.p.of(u), i, 7 * C, i * C)
        nisa.nc_matmul(dst=there, stationary=t.p.of(u)[:, i, :], moving=keys, accumulate=False)
        allowed = left(t.masks, i, 8 * C, i * C)
        nisa.tensor_tensor(dst=left(t.a.of(u), i, 8 * C, i * C), data1=there, data2=allowed, op=nl.multiply)
    diagonal = t.bank(4, C, C, 2 * C)
    nisa.nc_matmul(dst=diagonal, stationary=t.kq.of(u)[:, 1, :], moving=t.kq.of(u)[:, 0, :], accumulate=False)
    nisa.tensor_tensor(dst=t.a.of(u)[:, 7, :], data1=diagonal, data2=t.identity, op=nl.multiply)


def meet_keys(u, t):
    """E_h * (P_h (mask * Z)), left halves to dk, right halves to dq."""
    for i in range(7):
        there = t.bank(2 + i // 4, t.K, C, i % 4 * C)
        nisa.nc_matmul(dst=there, stationary=t.pt.of(u)[:, i, :], moving=t.zm.of(u)[:, i, :], accumulate=False)
        met = there.reshape_dim(1, (64 // LEVELS[i], 2, LEVELS[i]))
        decay = halves(t.decay.of(u), i, SUMS, i * C, 0)
        nisa.tensor_tensor(dst=halves(t.y.of(u), i, 16 * C, 2 * C * i, C), data1=met, data2=decay, op=nl.multiply)


def turn_states(u, t):
    """S and D [K, V] as [V, K], 128 value channels at a time."""
    d = t.rounded[u.head][u.odd]
    for j in range(len(t.parts)):
        n = t.parts[j]
        for x, turned, at in ((u.chunk.states[:, u.head, :], t.st.of(u), j * C), (d, t.dt.of(u), (2 + j) * C)):
            part = t.narrow(1, n, t.K, at)
            nisa.nc_transpose(dst=part, data=x[:, j * C : j * C + n], engine=nisa.engine.tensor)
            nisa.activation(dst=turned[0:n, j, :], op=nl.copy, data=part)


def meet_states(u, t):
    """What the entering state adds to dq, the gradient of the leaving one to dk, and both together to e^(b_C)."""
    K = t.K
    to_q, to_k, through = t.bank(3, K, C, 3 * C), t.bank(0, K, C), t.bank(0, K, K, C)
    for j in range(len(t.parts)):
        n = t.parts[j]
        v, do, s, d = t.vdo.of(u)[0:n, j, 0, :], t.vdo.of(u)[0:n, j, 1, :], t.st.of(u)[0:n, j, :], t.dt.of(u)[0:n, j, :]
        nisa.nc_matmul(dst=to_q, stationary=s, moving=do, accumulate=j > 0)
        nisa.nc_matmul(dst=to_k, stationary=d, moving=v, accumulate=j > 0)
        nisa.nc_matmul(dst=through, stationary=s, moving=d, accumulate=j > 0)
    nisa.tensor_tensor(dst=t.y.of(u)[:, 7, 1, :], data1=to_q, data2=t.decay.of(u)[:, B:REST], op=nl.multiply)
    nisa.tensor_tensor(dst=t.y.of(u)[:, 7, 0, :], data1=to_k, data2=t.decay.of(u)[:, REST:SUMS], op=nl.multiply)
    total = t.total.of(u)
    nisa.scalar_tensor_tensor(
        t.through.of(u), through, op0=nl.multiply, operand0=total, op1=nl.multiply, operand1=t.identity[0:K, 0:K]
    )


def add_up(u, t):
    K = t.K
    identity = t.identity[0:K, 0:K]
    for side in range(2):
        there = t.bank(6, C, K, side * C)
        for i in range(8):
            nisa.nc_matmul(dst=there, stationary=t.y.of(u)[:, i, side, :], moving=identity, accumulate=i > 0)
        other = u.chunk.q[:, u.head, :] if side == 0 else u.chunk.k[:, u.head, :]
        nisa.nc_matmul(dst=there, stationary=t.diagonal.of(u), moving=other, accumulate=True)


def differentiate_sums(u, t):
    """The gradient of an exponent: that of k or q at its level, times k or q."""
    y, kq, sums = t.y.of(u), t.kq.of(u), t.sums.of(u)
    for i in range(7):
        slope, by = halves(y, i, 16 * C, 2 * C * i, C), halves(kq, i, 2 * C, 0, C)
        nisa.tensor_tensor(dst=halves(sums, i, SUMS, i * C, 0), data1=slope, data2=by, op=nl.multiply)
    nisa.tensor_tensor(dst=sums[:, 7, :], data1=y[:, 7, 1, :], data2=kq[:, 1, :], op=nl.multiply)
    nisa.tensor_tensor(dst=sums[:, 8, :], data1=y[:, 7, 0, :], data2=kq[:, 0, :], op=nl.multiply)


def turn_sums(u, t):
    K = t.K
    for first, n, number, at in ((0, 4, 4, 0), (4, 4, 5, 0), (8, 1, 0, 2 * C)):
        turned = t.narrow(number, C, n * K, at)
        for i in range(n):
            part = turned[:, i * K : (i + 1) * K]
            nisa.nc_transpose(dst=part, data=t.sums.of(u)[:, first + i, :], engine=nisa.engine.tensor)
        nisa.activation(dst=t.sums_t.of(u)[:, first : first + n, :], op=nl.copy, data=turned.reshape_dim(1, (n, K)))


def gates(u, t):
    K = t.K
    dg = t.bank(6, C, K, 2 * C)
    ones = t.ones[0:K, :]
    nisa.nc_matmul(dst=dg, stationary=ones, moving=t.through.of(u), is_stationary_onezero=True, accumulate=False)
    for i in range(9):
        adjoint = t.adjoint[:, i, :]
        nisa.nc_matmul(dst=dg, stationary=adjoint, moving=t.sums_t.of(u)[:, i, :], accumulate=True)


def values(u, t):
    there = t.bank(7, C, t.V)
    for i in range(8):
        nisa.nc_matmul(dst=there, stationary=t.a.of(u)[:, i, :], moving=u.chunk.do[:, u.head, :], accumulate=i > 0)
    nisa.nc_matmul(dst=there, stationary=t.k_rest.of(u), moving=t.rounded[u.head][u.odd], accumulate=True)


def next_gradient(u, t):
    """D of the chunk before."""
    d, add = t.state[u.head], t.bank(7, t.K, t.V, 2 * C)
    nisa.nc_matmul(dst=add, stationary=t.q_bt.of(u), moving=u.chunk.do[:, u.head, :], accumulate=False)
    nisa.activation(dst=t.decayed.of(u), op=nl.copy, data=d, scale=t.total.of(u))
    nisa.tensor_tensor(dst=d, data1=t.decayed.of(u), data2=add, op=nl.add)
    nisa.activation(dst=t.rounded[u.head][1 - u.odd], op=nl.copy, data=d)


def finish(u, t):
    chunk, K = u.chunk, t.K
    nisa.activation(dst=chunk.dk[:, u.head, :], op=nl.copy, data=t.bank(6, C, K), scale=t.scale)
    nisa.activation(dst=chunk.dq[:, u.head, :], op=nl.copy, data=t.bank(6, C, K, C), scale=t.scale)
    nisa.activation(dst=chunk.dg[:, u.head, :], op=nl.copy, data=t.bank(6, C, K, 2 * C), scale=t.scale)
    nisa.activation(dst=chunk.dv[:, u.head, :], op=nl.copy, data=t.bank(7, C, t.V), scale=t.scale)


# (how many units behind the first stage, stage), in the order in which a step issues them: found by trying orders
# against the schedule. A state's gradient is made and rounded before the next unit, maybe of the same head, reads it.
PIPELINE = (
    (5, gates),
    (5, add_up),
    (4, turn_states),
    (5, finish),
    (1, multiply),
    (3, mask_values),
    (4, meet_states),
    (4, differentiate_sums),
    (4, values),
    (4, turn_sums),
    (3, meet_keys),
    (2, meet_values),
    (4, next_gradient),
    (0, turn_inputs),
    (1, score),
    (0, sum_gates),
    (1, turn_products),
)
