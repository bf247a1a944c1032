"""The states that enter the chunks of a sequence, computed again: the first half of gla_bwd.py.

    S' = e^{b_C} S + (k e^{b_C - b})^T v        names as in gla.py

Only the sums of gates after each token and of all of them are needed: 0.5 us a unit against the 1.8 of the forward
kernel. The states go to HBM [chunks, K, heads, V] in the dtype of the operands, which is all that the backward kernel
reads of them.
"""

from ringtide.kernels.nki.backend import nisa, nl
from ringtide.kernels.nki.units import C, Ring, at_once, load, run_down, split_turns, sum_from, sum_to, turns_of

TURN = 64  # units of a turn of the loop over a long sequence, at least


class Tiles(nl.NKIObject):
    """What lies on the chip: of the backward kernel's memory, chunk by chunk and PSUM banks, and tiles of its own."""

    def __init__(self, K, V, dtype, chunks, state, banks, after):
        line = PIPELINE if dtype != nl.float32 else at_once(PIPELINE)
        self.K, self.V, self.pipeline = K, V, line
        self.chunks, self.state, self.banks = chunks, state, banks
        self.after = after  # 0/1 [token, part, column]: all gates, then those after each column's token
        self.rest = Ring(line, decay_keys, decay_keys, (C, K), dtype)  # e^(b_C - b)
        self.k_rest = Ring(line, decay_keys, next_state, (C, K), dtype)  # k e^(b_C - b)
        self.total = Ring(line, decay_keys, next_state, (K, 1), nl.float32)  # e^(b_C)


def store_states(tiles, tensors, h0, states, group):
    """states [chunks, K, heads, V]: what enters each chunk. tensors: (k, v, g)."""
    b, of, _, count = group
    length = tensors[0].shape[1]
    for i in range(count):
        nisa.dma_copy(dst=tiles.state[i], src=h0[b, of + i])
    turns, each = turns_of(length, count, TURN)
    if turns > 0:
        loop = split_turns(tensors, turns, each)
        entering = states.slice(0, 0, turns * each).reshape_dim(0, (turns, each))

        def turn(i):
            forward_chunks(tiles, loop, entering, group, 0, each * C, i)

        nl.fori_loop(0, turns, turn)
    forward_chunks(tiles, tensors, states, group, turns * each * C, length, None)


def forward_chunks(tiles, tensors, states, group, start, end, turn):
    b, of, _, count = group
    copies = len(tiles.chunks)

    def load_chunk(i):
        chunk, t = tiles.chunks[i % copies], start + i * C
        load((chunk.k, chunk.v, chunk.g), tensors, b, t, min(end - t, C), of, count, turn)

    def store_chunk(i):
        there = state_window(states, start // C + i, count, turn)
        nisa.dma_copy(dst=there, src=tiles.chunks[i % copies].states[:, 0:count, :])

    chunks = (end - start + C - 1) // C
    run_down(tiles.pipeline, tiles, chunks, (0, 1), count, load_chunk, store_chunk)


def state_window(states, chunk, count, turn):
    """[K, count, V] of states [chunks, K, heads, V]; of [turns, chunks, K, heads, V] in turn `turn`."""
    if turn is None:
        return states[chunk, :, 0:count, :]
    K, heads, V = states.shape[2], states.shape[3], states.shape[4]
    pattern = [[heads * V, K], [V, count], [1, V]]
    return states.ap(pattern=pattern, offset=chunk * K * heads * V, scalar_offset=turn, indirect_dim=0)


def sum_rest(u, t):
    g, rest, total = u.chunk.g[:, u.head, :], t.banks[u.number % 2][:, 0 : t.K], t.banks[2 + u.number % 2][0 : t.K, 0:1]
    sum_from(rest, g, t.after, 1, 1 + C)
    sum_to(total, g, t.after, 0, 1)


def decay_keys(u, t):
    nisa.activation(dst=t.rest.of(u), op=nl.exp, data=t.banks[u.number % 2][:, 0 : t.K])
    nisa.activation(dst=t.total.of(u), op=nl.exp, data=t.banks[2 + u.number % 2][0 : t.K, 0:1])
    nisa.tensor_tensor(dst=t.k_rest.of(u), data1=u.chunk.k[:, u.head, :], data2=t.rest.of(u), op=nl.multiply)


def next_state(u, t):
    state, add = t.state[u.head], t.banks[4 + u.number % 2][0 : t.K, 0 : t.V]
    nisa.nc_matmul(dst=add, stationary=t.k_rest.of(u), moving=u.chunk.v[:, u.head, :], accumulate=False)
    nisa.activation(dst=u.chunk.states[:, u.head, :], op=nl.copy, data=state)
    nisa.scalar_tensor_tensor(dst=state, data=state, op0=nl.multiply, operand0=t.total.of(u), op1=nl.add, operand1=add)


PIPELINE = ((2, next_state), (1, decay_keys), (0, sum_rest))
