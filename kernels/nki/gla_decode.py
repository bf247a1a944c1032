"""One token of gated linear attention on Trainium2 for B sequences, whose states live in slots of a pool in HBM.

    S' = diag(e^g) S + k v^T        o = scale * S'^T q

A state is read once and written once; that takes the time, and the rest hides behind it. The pool is [slots, K, N, V],
float32, so that key channels become partitions and a row of a transfer, what several heads of a sequence hold of one
channel, is several KiB. (Of [slots, N, K, V] a row is one head's: 768 bytes at V = 192, 2.7 times as slow.)

    turn    the sequences whose heads fill 128 rows, 8 of 16 heads: their q, k, g come by one transfer each, [rows, K],
            are turned into columns [K, rows] by the tensor engine, and one exp serves all of them
    group   heads of one sequence whose states come and go by one transfer, [K, heads, V]; GROUPS of them are under way
    unit    as many heads of a group as a PSUM bank holds; its stages lie several units apart (PIPELINE)

    cycles of a head of 96/192 in float32             as simulator/cost.py prices them
    PE    v on all partitions = ones [1, K]^T v [1, V]                  384   (0/1: 2 a column)
    ACT   k v^T: times the column k, in PSUM where it lies              192
    ACT   e^g S: times the column e^g, in SBUF where it lies            192
    DVE   S' = e^g S + k v^T, one operand from PSUM: 1 a cycle          192
    PE    o^T [V, 1] = S'^T q, S' the stationary operand                512   (4 passes of 64, twice)
    DMA   147,456 bytes: 0.40 us, longer than any of these engines

    SBUF, bytes a partition, at most        PSUM banks (8)
    states, v     8 K each x GROUPS         v, then k v^T       AHEAD
    q, k, g, columns, o     6.5 K           q^T and k^T, g^T    2
    slots, ones               0.6 K         o^T, o              2

The program does not depend on the slots, which are read on the device: an address may come from memory, a branch may
not, so nothing is skipped. A pool has SPARE slots behind the sequences': one of zeros, which is never written, to read
for a sequence that begins or is not there, and one to write to, which is never read, for one that is not there. (A DMA
can skip an address out of bounds, oob_mode.skip; whether -1 is one, and what a skipped read leaves, is undocumented.)

How it got here, T_sched of 96/192 in float32 over the time of its bytes at 362 GB/s (1.09 now; bfloat16 1.06):
  1.49  all of a turn's loads first: they hold up the small ones of v, which the engines then wait for
  1.46  k v^T by the tensor engine, [1, K]^T [1, V]: float32 takes four passes, against two of ones
  1.35  o by S' as the moving operand: V columns of four passes, against 64 for each 128 columns of it
  1.29  o three units behind v, not four: the tensor engine waits for the sum in each unit
  1.18  (v k) + e^g S by scalar_tensor_tensor, which is half as fast as the sum with PSUM
Groups of 4 KiB or 6 of them under way make no difference.

Limits: K <= 128, V <= 512; ops.py splits what is larger.
"""

from ringtide.kernels.nki.backend import nisa, nki, nl
from ringtide.kernels.nki.units import BANK, shares

ROWS = 128  # (sequence, head)s of a turn
GROUP_BYTES = 8192  # of a partition; from 4 KiB on a transfer keeps the DMA engines busy
GROUPS = 8  # under way at once
AHEAD = 4  # units with k v^T in PSUM
SPARE = 2  # slots of a pool beyond the sequences'


@nki.jit
def gla_decode(q, k, v, g, pool, slots, scale):
    """(o [B, N, V] in v.dtype, pool). q, k [B, N, K], v [B, N, V] of one dtype, g [B, N, K] float32 in [-128, 0], pool
    [slots, K, N, V] float32, changed in place, slots [B, 2] int32: where to read a sequence's state, where to write it.
    """
    batch, heads, V = v.shape
    o = nl.ndarray((batch, heads, V), dtype=v.dtype, buffer=nl.shared_hbm)
    core, _, share = shares(heads)
    begin = core * share
    end = min(begin + share, heads)
    for first in range(begin, end, ROWS):
        run_heads((q, k, v, g, slots.expand_dim(2), o), pool, first, min(ROWS, end - first), scale)
    return o, pool


class Tiles(nl.NKIObject):
    """All on-chip memory, for turns of so many sequences of so many heads."""

    def __init__(self, sequences, heads, K, V, dtype):
        rows = sequences * heads
        self.heads, self.K, self.V = heads, K, V
        groups = (heads * V * 4 + GROUP_BYTES - 1) // GROUP_BYTES
        self.each = (heads + groups - 1) // groups  # heads of a group
        self.unit = min(self.each, BANK // V)  # heads of a unit
        depth = min(sequences * groups, GROUPS)
        self.slots = nl.ndarray((1, 2 * sequences), dtype=nl.int32)
        self.rows = [nl.ndarray((rows, K), dtype=x) for x in (dtype, dtype, nl.float32)]  # q, k, g
        self.columns = [nl.ndarray((K, rows), dtype=nl.float32) for _ in range(3)]  # scale q, k, e^g
        self.ones = nl.ndarray((1, K), dtype=dtype)
        self.v = [nl.ndarray((1, self.each, V), dtype=dtype) for _ in range(depth)]
        self.state = [nl.ndarray((K, self.each, V), dtype=nl.float32) for _ in range(depth)]
        self.o = nl.ndarray((rows, V), dtype=dtype)
        count = (V + 127) // 128
        width = (V + count - 1) // count
        self.parts = [(i, min(i + width, V)) for i in range(0, V, width)]  # of V, that o^T has on its partitions
        self.o_columns = nl.ndarray((width, len(self.parts), rows), dtype=nl.float32)
        both = nl.ndarray((K, 2, rows), dtype=dtype, buffer=nl.psum)
        self.turned = [both[:, 0, :], both[:, 1, :], psum(K, rows, nl.float32)]
        self.add = [psum(K, BANK, nl.float32) for _ in range(AHEAD)]  # k v^T of a unit
        self.o_turned = nl.ndarray((width, len(self.parts), rows), dtype=nl.float32, buffer=nl.psum)
        self.o_rows = psum(rows, V, nl.float32)
        nisa.memset(dst=self.ones, value=1.0, engine=nisa.engine.gpsimd)


class Group(nl.NKIObject):
    """`heads` heads of a sequence, from head `first` on, both counted in the turn."""

    def __init__(self, tiles, number, sequence, first):
        self.sequence, self.first, self.heads = sequence, first, min(tiles.each, tiles.heads - first)
        self.state = tiles.state[number % len(tiles.state)][:, 0 : self.heads, :]
        self.v = tiles.v[number % len(tiles.v)][:, 0 : self.heads, :]


class Unit(nl.NKIObject):
    """`heads` heads of a group, from its head `start` on. row: the first one's in the turn."""

    def __init__(self, tiles, number, group, start):
        self.heads, self.row = min(tiles.unit, group.heads - start), group.sequence * tiles.heads + group.first + start
        self.state = group.state[:, start : start + self.heads, :]
        self.v = group.v[:, start : start + self.heads, :]
        self.add = tiles.add[number % AHEAD][:, 0 : self.heads * tiles.V].reshape_dim(1, (self.heads, tiles.V))
        self.group, self.last = group, start + self.heads == group.heads


def psum(rows, columns, dtype):
    return nl.ndarray((rows, columns), dtype=dtype, buffer=nl.psum)


def run_heads(tensors, pool, head, heads, scale):
    """All sequences, `heads` heads from head `head` on."""
    batch, _, K = tensors[0].shape
    each = min(batch, ROWS // heads)  # sequences of a turn
    tiles = Tiles(each, heads, K, tensors[2].shape[2], tensors[2].dtype)
    turns = batch // each
    if turns < 2:
        turns = 0
    if turns > 0:
        loop = [x.slice(0, 0, turns * each).reshape_dim(0, (turns, each)) for x in tensors]

        def turn(i):
            run_turn(tiles, loop, pool, head, 0, each, scale, i)

        nl.fori_loop(0, turns, turn)
    for b in range(turns * each, batch, each):
        run_turn(tiles, tensors, pool, head, b, min(each, batch - b), scale, None)


def run_turn(tiles, tensors, pool, head, b, sequences, scale, turn):
    """Sequences from b on, unit after unit down the pipeline."""
    q, k, v, g, slots, o = tensors
    rows = sequences * tiles.heads
    groups, units = [], []
    for sequence in range(sequences):
        for first in range(0, tiles.heads, tiles.each):
            group = Group(tiles, len(groups), sequence, first)
            groups.append(group)
            for start in range(0, group.heads, tiles.unit):
                units.append(Unit(tiles, len(units), group, start))
    nisa.dma_copy(dst=tiles.slots[:, 0 : 2 * sequences], src=window(slots, b, sequences, 0, 2, turn))
    columns(tiles, (q, k, g), b, sequences, head, scale, turn)
    depth = len(tiles.state)
    for group in groups[0:depth]:
        load(tiles, group, v, pool, head, b, turn)
    done = 0
    for step in range(len(units) + LAST):
        for lag, stage in PIPELINE:
            number = step - lag
            if number >= 0 and number < len(units):
                stage(tiles, units[number])
        if step >= LAST and units[step - LAST].last:
            group = groups[done]
            nisa.dma_copy(dst=slot(tiles, group, pool, 2 * group.sequence + 1, head), src=group.state)
            if done + depth < len(groups):
                load(tiles, groups[done + depth], v, pool, head, b, turn)
            done += 1
    turn_output(tiles, rows)
    nisa.dma_copy(dst=window(o, b, sequences, head, tiles.heads, turn), src=tiles.o[0:rows, :])


def window(x, b, sequences, head, heads, turn):
    """Sequences from b on and heads from `head` on, of x [B, N, width]; of x [turns, B, N, width] in turn `turn`."""
    if turn is None:
        return x[b : b + sequences, head : head + heads, :]
    width = x.shape[3]
    row = x.shape[2] * width
    pattern = [[row, sequences], [width, heads], [1, width]]
    return x.ap(pattern=pattern, offset=b * row + head * width, scalar_offset=turn, indirect_dim=0)


def slot(tiles, group, pool, which, head):
    """[K, heads, V] of the pool: the group's heads in the slot that the turn's number `which` names."""
    row = pool.shape[2] * tiles.V
    pattern = [[row, tiles.K], [1, group.heads * tiles.V]]
    offset = (head + group.first) * tiles.V
    return pool.ap(pattern=pattern, offset=offset, scalar_offset=tiles.slots[:, which : which + 1], indirect_dim=0)


def load(tiles, group, v, pool, head, b, turn):
    nisa.dma_copy(dst=group.v, src=window(v, b + group.sequence, 1, head + group.first, group.heads, turn))
    nisa.dma_copy(dst=group.state, src=slot(tiles, group, pool, 2 * group.sequence, head))


def columns(tiles, tensors, b, sequences, head, scale, turn):
    """scale q, k, e^g of all rows as columns."""
    rows = sequences * tiles.heads
    for i in range(3):
        nisa.dma_copy(dst=tiles.rows[i][0:rows, :], src=window(tensors[i], b, sequences, head, tiles.heads, turn))
        turned = tiles.turned[i][:, 0:rows]
        nisa.nc_transpose(dst=turned, data=tiles.rows[i][0:rows, :], engine=nisa.engine.tensor)
        function, factor = ((nl.copy, scale), (nl.copy, 1.0), (nl.exp, 1.0))[i]
        nisa.activation(dst=tiles.columns[i][:, 0:rows], op=function, data=turned, scale=factor)


# --- the stages of a unit ---------------------------------------------------------------------------------------------


def spread_v(tiles, u):
    nisa.nc_matmul(dst=u.add, stationary=tiles.ones, moving=u.v, is_stationary_onezero=True, accumulate=False)


def decay(tiles, u):
    for i in range(u.heads):
        factor = tiles.columns[2][:, u.row + i : u.row + i + 1]
        nisa.activation(dst=u.state[:, i, :], op=nl.copy, data=u.state[:, i, :], scale=factor)


def times_k(tiles, u):
    for i in range(u.heads):
        factor = tiles.columns[1][:, u.row + i : u.row + i + 1]
        nisa.activation(dst=u.add[:, i, :], op=nl.copy, data=u.add[:, i, :], scale=factor)


def update(tiles, u):
    nisa.tensor_tensor(dst=u.state, data1=u.state, data2=u.add, op=nl.add)


def read_out(tiles, u):
    for i in range(u.heads):
        row = u.row + i
        q = tiles.columns[0][:, row : row + 1]
        for j in range(len(tiles.parts)):
            start, end = tiles.parts[j]
            there = tiles.o_turned[0 : end - start, j, row : row + 1]
            nisa.nc_matmul(dst=there, stationary=u.state[:, i, start:end], moving=q, accumulate=False)


def turn_output(tiles, rows):
    """o^T of all rows as [rows, V]."""
    for j in range(len(tiles.parts)):
        start, end = tiles.parts[j]
        here = tiles.o_columns[0 : end - start, j, 0:rows]
        nisa.tensor_copy(dst=here, src=tiles.o_turned[0 : end - start, j, 0:rows])
        nisa.nc_transpose(dst=tiles.o_rows[0:rows, start:end], data=here, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=tiles.o[0:rows, :], src=tiles.o_rows[0:rows, :])


# (how many units behind the first stage, stage), in the order in which a step issues them.
PIPELINE = ((AHEAD, read_out), (2, update), (1, times_k), (1, decay), (0, spread_v))
LAST = AHEAD
