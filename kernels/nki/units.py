"""Units of work down a pipeline, and the sizes and 0/1 matrices of a chunk: what the kernels share.

A unit is a chunk of C tokens of one head. In each step every stage works on another unit, `lag` units behind the first
stage, so that an engine in its recorded order finds its operands ready. A tile that one stage writes and a later one
reads has as many copies as the lag between them, and one more unless a step reads the old content before it writes.
"""

import numpy as np

from ringtide.kernels.nki.backend import nisa, nl

C = 128  # tokens a chunk: one a partition
BANK = 512  # float32 columns of a PSUM bank
TOKEN, COLUMN = np.arange(C)[:, None], np.arange(C)[None, :]
GROUP = 8  # heads that take turns, at most; a DMA moves a chunk of all of them


def level(h):
    """0/1 [token, column]: the gates between each column's token and the middle of its block of 2 h, see gla.py."""
    middle = COLUMN // (2 * h) * (2 * h) + h
    before, after = (COLUMN < TOKEN) & (middle > TOKEN), (middle <= TOKEN) & (TOKEN <= COLUMN)
    return np.where(middle > COLUMN, before, after)


def side_by_side(parts):
    """0/1 matrices as a float32 one, which a kernel takes as a constant."""
    return np.concatenate(parts, axis=1).astype(np.float32)


def in_parts(matrix, dtype):
    """A 0/1 matrix [token, column] in SBUF, [C, parts, columns]: for float32 operands in four parts of 32 tokens, each
    with zeros elsewhere; else whole. A sum of 128 gates that is rounded 127 times is off by several units in the last
    place of the whole, an exponent by as much in absolute terms; the sum of four sums by a quarter of it."""
    parts = 4 if dtype == nl.float32 else 1
    split = [np.where(TOKEN * parts // C == i, matrix, 0) for i in range(parts)]
    tile = nl.ndarray((C, parts, matrix.shape[1]), dtype=nl.float32)
    source = nl.shared_constant(np.ascontiguousarray(np.stack(split, axis=1), np.float32))
    nisa.dma_copy(dst=tile, src=source)
    return tile


def sum_to(dst, gates, matrix, first, last):
    """dst [K, last - first] = gates [C, K]^T times columns of a matrix `in_parts`."""
    for i in range(matrix.shape[1]):
        moving = matrix[:, i, first:last]
        nisa.nc_matmul(dst=dst, stationary=gates, moving=moving, is_moving_onezero=True, accumulate=i > 0)


def sum_from(dst, gates, matrix, first, last):
    """dst [last - first, K], the same transposed."""
    for i in range(matrix.shape[1]):
        stationary = matrix[:, i, first:last]
        nisa.nc_matmul(dst=dst, stationary=stationary, moving=gates, is_stationary_onezero=True, accumulate=i > 0)


def shares(count):
    """(this core, cores, the most of `count` that one of them takes)."""
    cores = nl.num_programs(0) if nl.program_ndim() > 0 else 1
    core = nl.program_id(0) if cores > 1 else 0
    return core, cores, (count + cores - 1) // cores


def groups(heads):
    """[(first head, count)]: as few groups as GROUP allows, as equal as can be, the smallest first."""
    number = (heads + GROUP - 1) // GROUP
    firsts = [heads * i // number for i in range(number + 1)]
    return [(firsts[i], firsts[i + 1] - firsts[i]) for i in range(number)]


class Ring(nl.NKIObject):
    """The copies of a tile that stage `first` writes and stage `last` is the last to read."""

    def __init__(self, pipeline, first, last, shape, dtype, buffer=nl.sbuf):
        places = [stage for _, stage in pipeline]
        copies = lag_of(pipeline, last) - lag_of(pipeline, first)
        if places.index(last) >= places.index(first):  # otherwise a step reads the old content before it writes the new
            copies = copies + 1
        self.copies = [nl.ndarray(shape, dtype=dtype, buffer=buffer) for _ in range(copies)]

    def of(self, unit):
        """The unit's copy."""
        return self.copies[unit.number % len(self.copies)]


class Unit(nl.NKIObject):
    """A chunk of one head on its way, the number-th of those that take turns. odd: whether its chunk is an odd one."""

    def __init__(self, number, chunk, head, odd):
        self.number, self.chunk, self.head, self.odd = number, chunk, head, odd


def lag_of(pipeline, stage):
    return {other: lag for lag, other in pipeline}[stage]


def longest(pipeline):
    """The lag of the last stage."""
    return max([lag for lag, _ in pipeline])


def at_once(pipeline):
    """The stages without lags: one unit after the other, for operands so wide that there is no room for more."""
    ordered = []
    for lag in range(longest(pipeline) + 1):
        ordered = ordered + [(0, stage) for at, stage in pipeline if at == lag]
    return ordered


def chunk_copies(pipeline, count):
    """How many chunks are in SBUF at once, of `count` heads each: one ahead, and those that the last stages work on."""
    return 2 + (longest(pipeline) + count - 1) // count


def run_down(pipeline, tiles, chunks, parity, count, load, store):
    """`chunks` chunks of `count` units down the pipeline: stage(unit, tiles). load(i) and store(i) move the i-th chunk,
    the former as many units ahead as a chunk has, the latter after the last stage of its last unit.

    parity: of the chunks, in turn: [0, 1] if the first is an even one.
    """
    last, works = longest(pipeline), []
    for number in range(chunks * count):
        at = number // count
        works.append(Unit(number, tiles.chunks[at % len(tiles.chunks)], number % count, parity[at % 2]))
    for step in range(-count, len(works) + last):
        ahead = step + count
        for lag, stage in pipeline:
            number = step - lag
            if number >= 0 and number < len(works):
                stage(works[number], tiles)
        done = step - last
        if done >= 0 and done % count == count - 1:
            store(done // count)
        if ahead % count == 0 and ahead < len(works):
            load(ahead // count)


def turns_of(length, count, units):
    """(turns of the loop over a sequence of `length` tokens, chunks of each turn): at least `units` units of `count`
    heads, an even number of chunks, since states alternate between two tiles. 0 turns: too short for a loop."""
    each = 2 * ((units + 2 * count - 1) // (2 * count))
    turns = length // (each * C)
    return (turns if turns > 1 else 0), each


def split_turns(tensors, turns, each):
    """Tensors [B, T, N, width] as [B, turns, tokens, N, width]."""
    return [x.slice(1, 0, turns * each * C).reshape_dim(1, (turns, each * C)) for x in tensors]


def window(x, b, t, rows, head, count, turn):
    """[rows, count, width] of x [B, T, N, width] from token t and head on; of [B, turns, T, N, width] in a turn."""
    if turn is None:
        return x[b, t : t + rows, head : head + count, :]
    heads, width = x.shape[3], x.shape[4]
    offset = ((b * x.shape[1] * x.shape[2] + t) * heads + head) * width
    pattern = [[heads * width, rows], [width, count], [1, width]]
    return x.ap(pattern=pattern, offset=offset, scalar_offset=turn, indirect_dim=1)


def load(tiles, tensors, b, t, rows, head, count, turn):
    """A chunk's inputs. The tokens that the last one lacks are zeros, which add nothing to any sum."""
    for i in range(len(tiles)):
        if rows < C:
            nisa.memset(dst=tiles[i], value=0.0, engine=nisa.engine.gpsimd)
        nisa.dma_copy(dst=tiles[i][0:rows, 0:count, :], src=window(tensors[i], b, t, rows, head, count, turn))
