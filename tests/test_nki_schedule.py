"""Times, memory and orders of recorded NKI programs, on records made by hand."""

import dataclasses
import itertools
import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ringtide.kernels.nki.simulator import capacity, memory, schedule
from ringtide.kernels.nki.simulator import isa as nisa
from ringtide.kernels.nki.simulator import language as nl
from ringtide.kernels.nki.simulator.errors import CapacityError, HazardError
from ringtide.kernels.nki.simulator.launch import jit, simulate
from ringtide.kernels.nki.simulator.machine import Instruction, Machine, Options
from ringtide.kernels.nki.simulator.memory import Storage
from ringtide.kernels.nki.simulator.orders import shuffled

KIB = 1024


def made(index, engine, us, after=(), reads=(), writes=(), loop=(), ordered=0, nbytes=0, op="op"):
    touch = lambda storages: tuple((x, None) for x in storages)
    line = f"kernel.py:{index}"
    return Instruction(
        index, op, engine, us, None, tuple(after), touch(reads), touch(writes), line, loop, ordered, 0.0, nbytes
    )


def program(*rows):
    """Instructions from (engine, us, after) or (engine, us, after, {more})."""
    return [made(i, *row[:3], **(row[3] if len(row) > 3 else {})) for i, row in enumerate(rows)]


def machine(instructions, **options):
    """A Machine with this record."""
    core = Machine(options=Options(**options))
    core.instructions = list(instructions)
    return core


def tile(space="psum", row_bytes=memory.PSUM_BANK, **options):
    return Storage("t", space, 1, row_bytes, **options)


def four(rows):
    times = schedule.times(program(*rows))
    return [round(times[f"t_{x}_us"], 6) for x in ("max", "sum", "sched", "list")]


# --- times ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        # alone on an engine: no latency
        ([("PE", 1, ()), ("PE", 2, (0,))], [3, 3, 3, 3]),
        # another engine waits 0.3
        ([("PE", 1, ()), ("DVE", 2, (0,))], [2, 3, 3.3, 3.3]),
        # two engines, nothing between them
        ([("PE", 1, ()), ("DVE", 2, ())], [2, 3, 2, 2]),
        # recorded order blocks the free instruction behind the one that waits
        ([("PE", 1, ()), ("DVE", 1, (0,)), ("DVE", 1, ())], [2, 3, 3.3, 2.3]),
        # ... which no_reorder keeps
        ([("PE", 1, ()), ("DVE", 1, (0,), {"ordered": 1}), ("DVE", 1, (), {"ordered": 1})], [2, 3, 3.3, 3.3]),
        # ... but not beyond its block
        ([("PE", 1, ()), ("DVE", 1, (0,), {"ordered": 1}), ("DVE", 1, (), {"ordered": 2})], [2, 3, 3.3, 2.3]),
        # what has the longer chain behind it goes first
        ([("PE", 1, ()), ("PE", 1, ()), ("ACT", 3, (1,))], [3, 5, 5.3, 4.3]),
        # turns of a loop are barriers: 1 + 0.3 + 1
        ([("PE", 1, (), {"loop": ((1, 0),)}), ("DVE", 1, (), {"loop": ((1, 1),)})], [1, 2, 2.3, 2.3]),
        # a transfer waits 1.3 and is no compute engine
        ([("DMA", 2, ())], [2, 0, 3.3, 3.3]),
        # transfers share the bandwidth, not the latency
        ([("DMA", 2, ()), ("DMA", 2, ())], [4, 0, 5.3, 5.3]),
        # a load overtakes the store that waits for it no more than the queues allow
        ([("PE", 5, ()), ("DMA", 1, (0,)), ("DMA", 1, ()), ("ACT", 3, (2,))], [5, 8, 7.6, 7.6]),
    ],
)
def test_times(rows, want):
    assert four(rows) == pytest.approx(want)


def test_the_seventeenth_transfer_waits_for_the_first():
    late = [("PE", 10, ()), ("DMA", 1, (0,)), *[("DMA", 0.01, ())] * 15]
    assert four([*late, ("ACT", 1, (16,))])[2] == pytest.approx(12.6)  # the 16th transfer, long there: the store ends
    assert four([*late, ("DMA", 1, ()), ("ACT", 1, (17,))])[2] == pytest.approx(12.6 + 1.3 + 1 + 0.3 + 1)
    assert four([*late, ("DMA", 1, ()), ("ACT", 1, (17,))])[3] == pytest.approx(12.6)  # in any order: not at all


def test_which_engine_and_how_long_the_chain():
    times = schedule.times(program(("PE", 1, ()), ("ACT", 1, (0,)), ("DVE", 3, ()), ("PE", 1, (1,))))
    assert times["critical"] == "DVE"
    assert times["engines"] == {"PE": 2, "ACT": 1, "DVE": 3, "POOL": 0, "DMA": 0}
    assert times["chain_us"] == pytest.approx(3.6)
    assert times["instructions"] == 4


def test_bytes_to_hbm_give_the_floor():
    hbm, sbuf = Storage("x", "hbm", 1, 64), Storage("y", "sbuf", 1, 64)
    rows = [
        made(0, "DMA", 1, reads=[hbm], writes=[sbuf], nbytes=362_000),
        made(1, "DMA", 1, reads=[hbm], writes=[hbm], nbytes=362_000),  # both ways
        made(2, "DMA", 1, reads=[sbuf], writes=[sbuf], nbytes=362_000),  # not at all
    ]
    times = schedule.times(rows)
    assert times["dma_bytes"] == 3 * 362_000
    assert times["hbm_floor_us"] == pytest.approx(3)


def test_steady_state_is_a_difference():
    unit = [("PE", 1, ()), ("DVE", 2, ())]
    short, long = (program(("DMA", 7, ()), *unit * n) for n in (4, 10))
    each = schedule.per_unit(short, long, 6)
    assert each["t_max_us"] == pytest.approx((20 - 8) / 6)
    assert each["t_sum_us"] == pytest.approx(3)
    assert each["engines"]["DMA"] == 0
    assert each["critical"] == "DVE"


def test_a_turn_of_a_loop():
    unit = lambda turn: [("PE", 1, (), {"loop": ((1, turn),)}), ("DVE", 2, (), {"loop": ((1, turn),)})]
    rows = [("DMA", 7, ()), *unit(0), *unit(1), *unit(2), ("ACT", 5, ())]
    rows[4] = ("DVE", 2, (0, 1, 2, 3), {"loop": ((1, 1),)})
    found = schedule.of_turn(program(*rows), 4)
    assert found["t_max_us"] == 2 / 4
    assert found["t_sched_us"] == pytest.approx((1 + 0.3 + 2 + 0.3) / 4)  # the barrier at its end, too
    assert found["instructions"] == 2 / 4
    assert found["engines"]["DVE"] == 2 / 4
    with pytest.raises(ValueError, match="no loop of two turns"):
        schedule.of_turn(program(*rows[:3]))


def test_turns_of_two_loops_one_after_another():
    rows = [("PE", us, (), {"loop": ((loop, turn),)}) for loop, us in ((1, 1), (2, 3)) for turn in range(2)]
    found = schedule.of_turn(program(*rows))
    assert found["t_max_us"] == 4
    assert found["t_sched_us"] == pytest.approx(1 + 0.3 + 3 + 0.3)


def test_a_turn_is_what_a_longer_loop_takes_longer():
    turn = _random(2, 100)
    loop = lambda turns: [
        dataclasses.replace(x, index=100 * n + x.index, after=tuple(100 * n + b for b in x.after), loop=((1, n),))
        for n in range(turns)
        for x in turn
    ]
    for name, us in schedule.per_unit(loop(3), loop(5), 2).items():
        if name not in ("engines", "critical"):
            assert us == pytest.approx(schedule.of_turn(loop(2))[name])


def test_the_slower_of_two_cores():
    rows = [program(("PE", us, ())) for us in (1, 4)]
    run = SimpleNamespace(machines=[SimpleNamespace(core=i, instructions=x) for i, x in enumerate(rows)])
    assert schedule.times(run)["t_sched_us"] == 4
    assert [event["pid"] for event in schedule.trace(run)["traceEvents"]] == [0, 1]


def test_nothing_takes_no_time():
    times = schedule.times([])
    assert times["t_max_us"] == times["t_sched_us"] == times["t_list_us"] == 0
    assert schedule.critical_path([])["path"] == []
    assert schedule.trace([])["traceEvents"] == []


def _random(seed, n):
    """A program with edges to any earlier instruction."""
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        engine = draw.choice(schedule.ENGINES)
        after = sorted({draw.randrange(max(0, i - 40), i) for _ in range(draw.randrange(4))} if i else ())
        rows.append((engine, draw.choice([0.05, 0.1, 0.3]), after, {"ordered": draw.choice([0, 0, i // 30 + 1])}))
    return program(*rows)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_keeps_every_rule(seed, free):
    rows = _random(seed, 300)
    plan = schedule._place(SimpleNamespace(instructions=rows), free=free)
    for x in rows:
        for b in x.after:
            sync = 0.3 if rows[b].engine != x.engine else 0.0
            lag = 1.3 if x.engine == "DMA" else 0.0
            assert plan.starts[x.index] >= plan.ends[b] + sync + lag - 1e-9
    for engine in schedule.ENGINES:
        mine = [x for x in rows if x.engine == engine]
        by_start = sorted(mine, key=lambda x: plan.starts[x.index])
        for a, b in itertools.pairwise(by_start):
            assert plan.starts[b.index] >= plan.ends[a.index] - 1e-9  # one at a time
        if not free and engine != "DMA":
            assert by_start == mine
        for number in {x.ordered for x in mine} - {0}:
            block = [x for x in by_start if x.ordered == number]
            if free or engine != "DMA":
                assert block == [x for x in mine if x.ordered == number]
    assert plan.end == max(plan.ends)


@pytest.mark.parametrize("seed", range(5))
def test_without_transfers_recorded_order_is_a_recurrence(seed):
    rows = [x for x in _random(seed, 300) if x.engine != "DMA"]
    place = {x.index: i for i, x in enumerate(rows)}
    rows = [
        dataclasses.replace(x, index=i, after=tuple(place[b] for b in x.after if b in place))
        for i, x in enumerate(rows)
    ]
    ends, free = [], dict.fromkeys(schedule.ENGINES, 0.0)
    for x in rows:
        start = max([free[x.engine], *(ends[b] + 0.3 * (rows[b].engine != x.engine) for b in x.after)])
        free[x.engine] = start + x.us
        ends.append(start + x.us)
    assert schedule.times(rows)["t_sched_us"] == pytest.approx(max(ends))


@pytest.mark.parametrize("seed", range(5))
def test_times_are_in_order(seed):
    times = schedule.times(_random(seed, 300))
    assert max(times["t_max_us"], times["chain_us"]) <= times["t_list_us"] <= times["t_sched_us"]


def test_the_critical_path_adds_up():
    rows = _random(1, 300)
    times, found = schedule.times(rows), schedule.critical_path(rows)
    assert sum(found["path_us"].values()) == pytest.approx(times["t_sched_us"])
    first, *rest = found["path"]
    assert first["waits"] == "start"
    for a, b in itertools.pairwise(found["path"]):
        assert b["start_us"] >= a["start_us"] + a["us"] - 1e-9
    assert {x["waits"] for x in rest} <= {"engine", "data"}
    assert found["idle_us"]["PE"] == pytest.approx(times["t_sched_us"] - times["engines"]["PE"])


def test_the_critical_path_says_what_each_waits_for():
    rows = program(("PE", 1, ()), ("PE", 1, ()), ("DVE", 2, (1,)), ("ACT", 0.1, ()))
    path = schedule.critical_path(rows)["path"]
    assert [(x["engine"], x["waits"], round(x["start_us"], 3)) for x in path] == [
        ("PE", "start", 0),
        ("PE", "engine", 1),
        ("DVE", "data", 2.3),
    ]
    assert path[1]["line"] == "kernel.py:1"


def test_a_path_crosses_barriers():
    turns = [("PE", 1, (), {"loop": ((1, turn),)}) for turn in range(3)]
    found = schedule.critical_path(program(*turns))
    assert [x["waits"] for x in found["path"]] == ["start"] * 3
    assert found["path_us"] == pytest.approx({"PE": 3, "latency": 0.6})


def test_trace_is_what_perfetto_reads():
    rows = program(("DMA", 1, (), {"nbytes": 4096, "op": "dma_copy"}), ("PE", 2, (0,)))
    text = json.loads(json.dumps(schedule.trace(rows)))
    load, matmul = text["traceEvents"]
    assert {k: load[k] for k in ("name", "ph", "pid", "tid", "dur")} == {
        "name": "dma_copy",
        "ph": "X",
        "pid": 0,
        "tid": "DMA",
        "dur": 1,
    }
    assert load["ts"] == pytest.approx(1.3)
    assert matmul["ts"] == pytest.approx(2.6)
    assert load["args"]["bytes"] == 4096
    assert matmul["args"]["line"] == "kernel.py:1"
    assert set(load["args"]) >= {"op", "cycles", "line"}


def test_twenty_thousand_instructions_take_seconds():
    rows = _random(0, 20_000)
    start = time.process_time()
    schedule.times(rows)
    assert time.process_time() - start < 10


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_counted_while_alive():
    a, b, c = (tile("sbuf", n * KIB) for n in (10, 20, 40))
    core = machine(
        [made(0, "DVE", 1, writes=[a]), made(1, "DVE", 1, (0,), [a], [b]), made(2, "DVE", 1, (1,), [b], [c])]
    )
    found = capacity.check(core)
    assert found.sbuf_bytes == 60 * KIB  # b and c
    assert found.sbuf_total == 70 * KIB
    assert found.sbuf_line == "kernel.py:2"
    assert found.psum_banks == 0
    assert found.edges == {}


def test_too_much_sbuf():
    tiles = [tile("sbuf", 100 * KIB) for _ in range(3)]
    rows = [*(made(i, "DVE", 1, writes=[x]) for i, x in enumerate(tiles)), made(3, "DVE", 1, reads=tiles)]
    with pytest.raises(CapacityError, match=r"op at kernel.py:2: 307,200 bytes a partition of SBUF alive.*196,608: "):
        capacity.check(machine(rows))
    assert capacity.check(machine(rows, sbuf_bytes=300 * KIB)).sbuf_bytes == 300 * KIB


def test_sbuf_that_is_used_again_waits():
    a, b, c = (tile("sbuf", 80 * KIB) for _ in range(3))
    rows = [
        made(0, "DVE", 1, writes=[a]),
        made(1, "ACT", 1, (0,), reads=[a]),
        made(2, "DVE", 1, writes=[b]),
        made(3, "POOL", 1, writes=[c]),  # takes what is left, and bytes of a
    ]
    assert capacity.check(machine(rows)).edges == {3: (1,)}
    assert capacity.check(machine(rows, sbuf_bytes=240 * KIB)).edges == {}
    times = schedule.times(machine(rows))
    assert times["t_sched_us"] == pytest.approx(1 + 0.3 + 1 + 0.3 + 1)


def test_ninth_bank():
    tiles = [tile() for _ in range(9)]
    rows = [*(made(i, "PE", 1, writes=[x]) for i, x in enumerate(tiles)), made(9, "DVE", 1, reads=tiles)]
    with pytest.raises(CapacityError, match=r"kernel.py:8: 9 banks of PSUM alive, in 9 tiles .* there are 8: copy"):
        capacity.check(machine(rows))
    assert capacity.check(machine([*rows[:8], made(8, "DVE", 1, reads=tiles[:8])])).psum_banks == 8


def test_a_fresh_tile_takes_the_bank_free_for_longest():
    tiles = [tile() for _ in range(10)]
    rows = []
    for i, x in enumerate(tiles):
        rows += [made(2 * i, "PE", 1, writes=[x]), made(2 * i + 1, "DVE", 1, (2 * i,), reads=[x])]
    found = capacity.check(machine(rows))
    assert [found.banks[x] for x in tiles] == [(i % 8, 1) for i in range(10)]
    assert found.edges == {16: (1,), 18: (3,)}
    assert found.psum_banks == 1
    assert found.psum_total == 10


def test_all_that_begins_in_a_bank_waits_for_all_that_ends_there():
    old, fillers, new = tile(), [tile() for _ in range(7)], tile()
    rows = [
        made(0, "PE", 1, writes=[old]),
        made(1, "DVE", 1, (0,), reads=[old]),
        made(2, "ACT", 1, (0,), reads=[old]),
        *(made(3 + i, "PE", 1, writes=[x]) for i, x in enumerate(fillers)),
        made(10, "PE", 1, writes=[new]),
        made(11, "PE", 1, writes=[new]),  # other columns
        made(12, "ACT", 1, (10, 11), reads=[new]),
    ]
    assert capacity.check(machine(rows)).edges == {10: (1, 2), 11: (1, 2)}


def test_wide_tiles_take_banks_side_by_side():
    wide, narrow = tile(row_bytes=5 * KIB), tile(row_bytes=100)
    rows = [made(0, "PE", 1, writes=[narrow]), made(1, "PE", 1, writes=[wide]), made(2, "DVE", 1, reads=[wide, narrow])]
    found = capacity.check(machine(rows))
    assert found.banks == {narrow: (0, 1), wide: (1, 3)}
    assert found.psum_banks == 4


def test_holes_too_small_for_a_wide_tile():
    tiles, wide = [tile() for _ in range(8)], tile(row_bytes=4 * KIB)
    kept = tiles[::2]
    rows = [*(made(i, "PE", 1, writes=[x]) for i, x in enumerate(tiles)), made(8, "DVE", 1, reads=tiles)]
    rows += [made(9, "PE", 1, writes=[wide]), made(10, "DVE", 1, reads=[*kept, wide])]
    with pytest.raises(CapacityError, match="needs 2 PSUM banks side by side"):
        capacity.check(machine(rows))


def test_the_tightest_hole_where_the_longest_free_would_leave_no_room():
    a, b, wide = tile(), tile(), tile(row_bytes=14 * KIB)
    rows = [
        made(0, "PE", 1, writes=[a]),
        made(1, "PE", 1, writes=[b]),  # a bank that was never used would be the second, and six stay side by side
        made(2, "PE", 1, writes=[wide]),
        made(3, "DVE", 1, (1, 2), reads=[b, wide]),
    ]
    found = capacity.check(machine(rows))
    assert found.banks == {a: (0, 1), b: (0, 1), wide: (1, 7)}
    assert found.edges == {1: (0,)}


def test_a_tile_made_before_a_loop_lives_through_it():
    carried, inner = tile("sbuf", KIB), [tile("sbuf", KIB, scope=(1, turn)) for turn in range(2)]
    rows = []
    for turn in range(2):
        loop = ((1, turn),)
        rows += [made(3 * turn, "DVE", 1, writes=[carried], loop=loop)]
        rows += [made(3 * turn + 1, "DVE", 1, writes=[inner[turn]], loop=loop)]
        rows += [made(3 * turn + 2, "DVE", 1, reads=[inner[turn]], loop=loop)]
    assert capacity.check(machine(rows)).sbuf_bytes == 2 * KIB
    assert capacity.check(machine(rows)).sbuf_total == 2 * KIB  # the turns' tiles are one
    rows[3] = made(3, "DVE", 1, writes=[inner[1]], loop=((1, 1),))  # now only the first turn touches it
    assert capacity.check(machine(rows)).sbuf_bytes == 2 * KIB


def test_an_address_fixes_the_bank():
    here, there, other = tile(address=(0, 0)), tile(address=(0, 3 * memory.PSUM_BANK)), tile()
    rows = [made(0, "PE", 1, writes=[here]), made(1, "PE", 1, writes=[other]), made(2, "PE", 1, writes=[there])]
    rows.append(made(3, "DVE", 1, reads=[here, other, there]))
    found = capacity.check(machine(rows))
    assert found.psum_banks == 3
    assert found.banks[other][0] not in (0, 3)


def test_two_small_tiles_share_a_bank_by_their_addresses():
    tiles = [tile(row_bytes=100, address=(0, 128 * i)) for i in range(16)]
    rows = [*(made(i, "PE", 1, writes=[x]) for i, x in enumerate(tiles)), made(16, "DVE", 1, reads=tiles)]
    assert capacity.check(machine(rows)).psum_banks == 1


@pytest.mark.parametrize("space", ["sbuf", "psum"])
def test_same_address_is_used_again(space):
    a, b = (tile(space, 512, address=(0, at)) for at in (0, 256))
    rows = [made(0, "PE", 1, writes=[a]), made(1, "DVE", 1, (0,), reads=[a]), made(2, "PE", 1, writes=[b])]
    assert capacity.check(machine(rows)).edges == {2: (1,)}
    rows.append(made(3, "DVE", 1, reads=[a]))
    with pytest.raises(HazardError, match=r"kernel.py:2: t lies at \(0, 256\), on bytes of t at \(0, 0\).*another"):
        capacity.check(machine(rows))


# --- orders ---------------------------------------------------------------------------------------------------------


def pipeline(x, w):
    """Running sums of exp(x w) over chunks, the last row of each carried on; written twice into one tile of SBUF."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="out")
    weights = nl.ndarray(w.shape, w.dtype, name="weights")
    carry = nl.ndarray((x.shape[1], 1), nl.float32, name="carry")
    tile = nl.ndarray((x.shape[1], x.shape[2]), nl.float32, name="tile")
    nisa.dma_copy(weights, w)
    nisa.memset(carry, 0.0)
    for i in range(x.shape[0]):
        nisa.dma_copy(tile, x[i])
        product = nl.ndarray(tile.shape, nl.float32, buffer=nl.psum)
        nisa.nc_matmul(product, weights, tile, accumulate=False)
        nisa.activation(tile, nl.exp, product)
        nisa.tensor_tensor_scan(tile, tile, tile, carry, nl.add, nl.maximum)
        nisa.tensor_copy(carry, tile[:, tile.shape[1] - 1 :])
        nisa.dma_copy(out[i], tile)
    return out


def recorded(kernel, *arrays, cores=None, **options):
    call = simulate(jit(kernel)[cores] if cores else kernel, **options)
    call(*arrays)
    return call.last


def _arrays():
    draw = np.random.default_rng(0)
    return draw.standard_normal((3, 8, 6)).astype(np.float32), draw.standard_normal((8, 8)).astype(np.float32) / 4


def test_orders_are_legal_and_differ():
    run = recorded(pipeline, *_arrays())
    core = run.machines[0]
    orders = [shuffled(run, seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 5
    for order in orders:
        place = {index: at for at, (_, index) in enumerate(order)}
        assert sorted(place) == list(range(len(core.instructions)))
        assert all(place[b] < place[x.index] for x in core.instructions for b in x.after)


def test_outputs_stay_as_recorded():
    run = recorded(pipeline, *_arrays())
    before = run.outputs.array().copy()
    shuffled(run, 3)
    np.testing.assert_array_equal(run.outputs.array(), before)


@pytest.mark.parametrize("seed", range(10))
def test_a_dropped_dependency_shows(seed):
    run = recorded(pipeline, *_arrays())
    with pytest.raises(HazardError, match=r"in another order \(\w+ at .*py:\d+ before \w+ at .*py:\d+\)"):
        shuffled(run, seed, drop=True)


def test_an_instruction_that_writes_more_than_it_says():
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="out")
        a, b = (nl.ndarray(x.shape, x.dtype) for _ in range(2))
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, x)
        secret = nisa.tensor_scalar(a, a, nl.multiply, 2.0)
        run, index = secret.run, secret.index

        def more():
            run()
            b.array()[...] = 7 + index

        secret.run = more
        nisa.tensor_tensor(b, b, b, nl.add)
        nisa.dma_copy(out, b)
        return out

    run = recorded(kernel, np.ones((4, 4), np.float32))
    with pytest.raises(HazardError, match=r"'out' comes out otherwise in another order: \d+ of its 64 bytes"):
        [shuffled(run, seed) for seed in range(20)]


def test_no_reorder_keeps_its_order_in_any_order():
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tiles = [nl.ndarray(x.shape, x.dtype) for _ in range(6)]
        with nl.no_reorder():
            for value, tile in enumerate(tiles):
                nisa.memset(tile, float(value), engine=nisa.engine.vector)
        nisa.dma_copy(out, tiles[-1])
        return out

    run = recorded(kernel, np.ones((4, 4), np.float32))
    for seed in range(5):
        order = [index for _, index in shuffled(run, seed)]
        assert [i for i in order if i < 6] == list(range(6))


def test_an_input_that_is_written_begins_as_it_was():
    def kernel(x):
        tile = nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(tile, x)
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        nisa.dma_copy(x, tile)
        return x

    run = recorded(kernel, np.ones((4, 4), np.float32))
    shuffled(run, 0)
    shuffled(run, 1)
    assert (run.outputs.array() == 2).all()


def test_two_cores_between_barriers():
    def kernel(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="out")
        middle = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="middle")
        me = nl.program_id(0)
        tile = nl.ndarray(x.shape[1:], x.dtype)
        nisa.dma_copy(tile, x[me])
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        nisa.dma_copy(middle[me], tile)
        nisa.core_barrier(middle, (0, 1))
        nisa.dma_copy(tile, middle[1 - me])
        nisa.dma_copy(out[me], tile)
        return out

    run = recorded(kernel, np.arange(32, dtype=np.float32).reshape(2, 4, 4), cores=2)
    orders = [shuffled(run, seed) for seed in range(10)]
    assert len({tuple(order) for order in orders}) > 5


def test_perturbed_activations_come_out_the_same():
    run = recorded(pipeline, *_arrays(), perturb=2**-12)
    for seed in range(5):
        shuffled(run, seed)


def test_a_run_without_dependencies_has_none_to_drop():
    def kernel(x):
        nisa.memset(nl.ndarray((4, 4), nl.float32), 1.0)

    with pytest.raises(ValueError, match="no dependency"):
        shuffled(recorded(kernel, np.ones(1, np.float32)), drop=True)


def test_a_kernel_priced_by_hand():
    x, w = np.zeros((4, 128, 256), np.float32), np.zeros((128, 128), np.float32)
    times = schedule.times(recorded(pipeline, x, w))
    assert times["engines"] == pytest.approx(
        {
            "PE": 4 * 4 * 256 / 2400,  # float32: four passes
            "ACT": 4 * 256 / 1200,
            "DVE": (64 + 4 * (2 * 256 + 64)) / 960,  # a memset and a copy of one column each, and scans
            "POOL": 0,
            # rows of 512 bytes at a quarter of the bandwidth, then of 1,024 at half
            "DMA": (65536 * 4 + 2 * 4 * 131072 * 2) / 368e3,
        }
    )
    assert times["dma_bytes"] == 65536 + 2 * 4 * 131072
    # One tile for all: load, matmul, exp, scan, store of a chunk, then the next one; the copy waits for nobody.
    chunk = 1.3 + 0.3 + 4 * 256 / 2400 + 0.3 + 256 / 1200 + 0.3 + 512 / 960 + 1.3 + 0.3 + 2 * 131072 * 2 / 368e3
    assert times["chain_us"] == pytest.approx(4 * chunk)
    assert times["t_sched_us"] == pytest.approx(65536 * 4 / 368e3 + 4 * chunk)  # the first load comes after the weights
