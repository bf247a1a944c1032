"""Layouts: how a sequence of T positions is laid over P shards, as arithmetic from index to position and back.

    contiguous   shard r holds positions r*T/P ... (r+1)*T/P - 1
    zigzag       the sequence is cut into 2P pieces; shard r holds pieces r and 2P-1-r, so causal work is balanced
    striped      shard r holds positions r, r+P, r+2P, ...

`index` counts along the array in layout order, shard after shard; `position` is the place in the original sequence.
Everything is elementwise integer arithmetic: Python ints, NumPy, JAX and traced values alike.
"""

LAYOUTS = ("contiguous", "zigzag", "striped")
PIECES = {"contiguous": 1, "zigzag": 2, "striped": 1}  # of a shard, of equal length, in which positions ascend


def multiple(layout: str, shards: int) -> int:
    """T must be a multiple of this number."""
    _check(layout)
    return 2 * shards if layout == "zigzag" else shards


def position_of(index, layout: str, length: int, shards: int):
    """Position held at `index` of an array of `length` tokens in layout order."""
    check_length(layout, length, shards)
    if layout == "contiguous" or length == 0:
        return index
    local = length // shards
    shard, offset = index // local, index % local
    if layout == "striped":
        return offset * shards + shard
    half = local // 2
    second = offset >= half  # the mirrored piece
    piece = shard + second * (2 * shards - 1 - 2 * shard)
    return piece * half + offset - second * half


def index_of(position, layout: str, length: int, shards: int):
    """Index at which `position` is held: the inverse of `position_of`."""
    check_length(layout, length, shards)
    if layout == "contiguous" or length == 0:
        return position
    local = length // shards
    if layout == "striped":
        return (position % shards) * local + position // shards
    half = local // 2
    piece = position // half
    second = piece >= shards
    shard = piece + second * (2 * shards - 1 - 2 * piece)
    return shard * local + position % half + second * half


def check_length(layout: str, length: int, shards: int) -> None:
    """Raises ValueError, naming the next length that serves, unless `length` can be laid over `shards`."""
    need = multiple(layout, shards)
    if length % need:
        longer = -(-length // need) * need
        raise ValueError(
            f"sequence length {length} does not divide into the {layout} layout over {shards} shards "
            f"(a multiple of {need} is needed): pad it to {longer}"
        )


def _check(layout):
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
