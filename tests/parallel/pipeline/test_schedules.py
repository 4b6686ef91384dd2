"""Pipeline schedules: rules, closed forms, the best that is possible in lock step."""

import heapq
import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config.pending import TABLES_ONLY
from moejax.errors import ConfigError
from moejax.parallel.pipeline import SCHEDULES, build
from moejax.parallel.pipeline.schedule import Order
from moejax.parallel.pipeline.validate import violations

VIRTUAL = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3, 4], "v_shaped": [2], "zero_bubble": [1, 2, 3]}


@st.composite
def numbers(draw):
    name = draw(st.sampled_from(sorted(VIRTUAL)))
    return name, draw(st.integers(1, 6)), draw(st.integers(1, 13)), draw(st.sampled_from(VIRTUAL[name]))


def test_every_schedule_is_tested():
    assert VIRTUAL.keys() == SCHEDULES.keys()


def test_those_with_passes_for_gradients_of_weights_are_tables_only():
    weighted = [name for name in SCHEDULES if build(name, 2, 2, SCHEDULES[name].least_stages).order.weight is not None]
    assert weighted == list(TABLES_ONLY)


@pytest.mark.parametrize("name", SCHEDULES)
def test_there_is_a_schedule_for_the_stages_that_it_takes_and_no_other(name):
    for stages in range(1, 6):
        if SCHEDULES[name].takes(stages):
            assert build(name, 2, 3, stages).num_stages == 2 * stages
        else:
            with pytest.raises(
                ConfigError, match=rf"schedule={name} has .* on each rank, not virtual_stages={stages}; use virtual_stages="
            ):
                build(name, 2, 3, stages)


@given(numbers())
def test_every_table_keeps_the_rules(drawn):
    name, ranks, microbatches, virtual = drawn
    schedule = build(name, ranks, microbatches, virtual)
    assert list(violations(schedule.order, ranks, microbatches)) == []
    for kind in "FB":
        grid = schedule.grid(kind)
        assert grid.shape == (schedule.num_ticks, ranks, 2)
        assert (grid[:, :, 0] >= 0).sum() == ranks * virtual * microbatches
    assert schedule.cost() > schedule.free_running_cost() - 1e-6
    assert schedule.free_running_cost() > 3 * microbatches - 1e-6
    assert max(schedule.in_flight()) == schedule.num_residuals <= virtual * microbatches


@given(numbers())
def test_what_waits_at_the_same_time_has_different_slots(drawn):
    name, ranks, microbatches, virtual = drawn
    schedule = build(name, ranks, microbatches, virtual)
    order = schedule.order
    end = order.backward if order.weight is None else {key: max(t, order.backward[key]) for key, t in order.weight.items()}
    for rank in range(ranks):
        held: dict[tuple[int, int], tuple[int, int]] = {}
        for key in order.forward:
            if order.place[key[0]] == rank:
                assert schedule.residual_slot[key] < schedule.num_residuals
                for tick in range(order.forward[key], end[key] + 1):
                    assert held.setdefault((tick, schedule.residual_slot[key]), key) == key


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (4, 8), (8, 16), (3, 5), (8, 3)])
def test_bubbles_are_the_closed_forms(ranks, microbatches):
    plain = Fraction(ranks - 1, microbatches + ranks - 1)
    for name in ("gpipe", "1f1b"):
        assert build(name, ranks, microbatches).bubble() == pytest.approx(float(plain))
        assert SCHEDULES[name].theory(ranks, microbatches, 1) == float(plain)


@pytest.mark.parametrize(("ranks", "groups", "virtual"), [(2, 1, 2), (4, 2, 2), (8, 2, 2), (3, 2, 4), (4, 3, 3)])
def test_interleaving_divides_the_bubble(ranks, groups, virtual):
    microbatches = ranks * groups
    schedule = build("interleaved", ranks, microbatches, virtual)
    expected = SCHEDULES["interleaved"].theory(ranks, microbatches, virtual)
    assert expected == (ranks - 1) / (virtual * microbatches + ranks - 1)
    assert schedule.bubble() == pytest.approx(expected)
    under_way = [2 * (ranks - 1 - rank) + (virtual - 1) * ranks + 1 for rank in range(ranks)]
    assert schedule.in_flight() == [min(count, virtual * microbatches) for count in under_way]


def test_microbatches_that_are_no_whole_groups_only_lengthen_the_end():
    assert SCHEDULES["interleaved"].theory(4, 6, 2) is None
    assert build("interleaved", 4, 6, 2).cost() <= build("interleaved", 4, 8, 2).cost()


def test_a_v_holds_equally_much_on_every_rank():
    assert build("v_shaped", 4, 16, 2).in_flight() == [8, 8, 8, 8]
    assert build("1f1b", 4, 16).in_flight() == [7, 5, 3, 1]
    assert build("gpipe", 4, 16).in_flight() == [16, 16, 16, 16]


def test_without_keeping_step_zero_bubble_is_zb_h1():
    schedule = build("zero_bubble", 4, 8)
    theory = SCHEDULES["zero_bubble"].theory(4, 8, 1)
    assert 1 - 24 / schedule.free_running_cost(1, 2, 1) == pytest.approx(theory)
    assert schedule.cost(1, 2, 1) == 3 * 8 + 2 * 3  # in lock step only the ticks of W are shared


def lock_step_optimum(ranks: int, microbatches: int, place: tuple[int, ...], *, is_split: bool) -> float:
    """The least cost of any table, by a search over what is done: tick after tick, any choice of passes. F costs 1, B and W 1 each."""
    last = len(place) - 1
    mine = [[s for s in range(last + 1) if place[s] == rank] for rank in range(ranks)]
    kinds = (1, 1, 1) if is_split else (1, 2)
    start, goal = (((n,) * (last + 1),) * len(kinds) for n in (0, microbatches))
    best, heap, order = {start: 0}, [(0, 0, start)], itertools.count()

    def can_run(kind: int, stage: int, before: tuple, now: list) -> bool:
        if now[kind][stage] >= microbatches:
            return False
        if kind == 0:
            return stage == 0 or now[0][stage] < before[0][stage - 1]
        if kind == 2:
            return now[2][stage] < now[1][stage]
        return now[1][stage] < now[0][stage] and (stage == last or now[1][stage] < before[1][stage + 1])

    def outcomes(kinds_now: list[int], before: tuple, now: list):
        if not kinds_now:
            yield tuple(map(tuple, now))
            return
        kind, *later = kinds_now
        # A pass more in a tick that has its kind anyway costs nothing and never hurts, so no rank stays idle that could run one.
        choices = [[s for s in stages if can_run(kind, s, before, now)] or [None] for stages in mine]
        if choices == [[None]] * ranks:
            return
        for chosen in itertools.product(*choices):
            after = [list(counts) for counts in now]
            for stage in chosen:
                if stage is not None:
                    after[kind][stage] += 1
            yield from outcomes(later, before, after)

    while heap:
        cost, _, state = heapq.heappop(heap)
        if state == goal:
            return cost / (len(place) // ranks)
        if cost > best[state]:
            continue
        for size in range(1, len(kinds) + 1):
            for used in itertools.combinations(range(len(kinds)), size):
                price = cost + sum(kinds[kind] for kind in used)
                for after in outcomes(list(used), state, [list(counts) for counts in state]):
                    if price < best.get(after, float("inf")):
                        best[after] = price
                        heapq.heappush(heap, (price, next(order), after))
    raise AssertionError("no table reaches the end")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_v_shaped_and_zero_bubble_are_the_best_that_lock_step_allows(ranks, microbatches):
    v_shaped = build("v_shaped", ranks, microbatches, 2)
    assert v_shaped.cost() == lock_step_optimum(ranks, microbatches, v_shaped.order.place, is_split=False)
    zero_bubble = build("zero_bubble", ranks, microbatches)
    assert zero_bubble.cost() == lock_step_optimum(ranks, microbatches, zero_bubble.order.place, is_split=True)
    one_f_one_b = build("1f1b", ranks, microbatches)
    assert one_f_one_b.cost() == lock_step_optimum(ranks, microbatches, one_f_one_b.order.place, is_split=False)


def changed(order: Order, kind: str, key: tuple[int, int], tick: int | None) -> Order:
    ticks = dict(getattr(order, kind))
    if tick is None:
        del ticks[key]
    else:
        ticks[key] = tick
    return order._replace(**{kind: ticks})


@pytest.mark.parametrize(
    ("kind", "key", "tick", "words"),
    [
        ("forward", (1, 2), None, "forward passes are not one for each"),
        ("backward", (0, 9), 40, "backward passes are not one for each"),
        ("forward", (1, 0), 0, "before stage 0 has handed it on"),
        ("backward", (0, 0), 3, "before stage 1 has handed it back"),
        ("backward", (3, 7), 2, "before its forward pass"),
        ("forward", (0, 7), 6, "rank 0 runs two forward passes in tick 6"),
        ("forward", (0, 0), -1, "negative tick"),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused_with_the_place(kind, key, tick, words):
    order = build("1f1b", 4, 8).order
    assert any(words in fault for fault in violations(changed(order, kind, key, tick), 4, 8))


def test_stages_have_to_lie_on_neighbours_and_evenly():
    order = build("interleaved", 4, 4, 2).order
    far = order._replace(place=(0, 2, 1, 3, 0, 1, 2, 3))
    assert any("which is no neighbour" in fault for fault in violations(far, 4, 4))
    uneven = order._replace(place=(0, 0, 0, 1, 1, 2, 2, 3))
    assert any("rank 0 has 3 of 8 stages" in fault for fault in violations(uneven, 4, 4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f2b", 4, 8, 1), "schedule=1f2b is not one of gpipe, 1f1b, interleaved, v_shaped, zero_bubble"),
        (("1f1b", 4, 8, 2), "schedule=1f1b has 1 stage on each rank, not virtual_stages=2; use virtual_stages=1, or schedule interleaved"),
        (
            ("interleaved", 4, 8, 1),
            "has 2 or more stages on each rank, not virtual_stages=1; use virtual_stages=2, or schedule gpipe or 1f1b",
        ),
        (("v_shaped", 4, 8, 3), "has 2 stages on each rank, not virtual_stages=3; use virtual_stages=2, or schedule interleaved"),
        (("1f1b", 0, 8, 1), "ranks=0 is below 1"),
        (("1f1b", 2, 0, 1), "microbatches=0 is below 1"),
    ],
)
def test_numbers_that_a_schedule_cannot_have_are_refused(words, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        build(*words)
