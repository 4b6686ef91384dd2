"""The table that the executor reads, run with labels in place of arrays: every pass finds what belongs to it, in every slot and channel."""

from hypothesis import given
from hypothesis import strategies as st

from moejax.parallel.pipeline import build
from moejax.parallel.pipeline.loops import loops
from moejax.parallel.pipeline.schedule import Schedule
from moejax.parallel.pipeline.table import columns, kinds

EXECUTED = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3, 4], "v_shaped": [2]}
WAYS = {"next": 1, "previous": -1, "here": 0}


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(EXECUTED)))
    return build(name, draw(st.integers(2, 6)), draw(st.integers(1, 13)), draw(st.sampled_from(EXECUTED[name])))


@given(schedules())
def test_every_pass_finds_what_belongs_to_it(schedule):
    done = play(schedule)
    wanted = {(stage, m) for stage in range(schedule.num_stages) for m in range(schedule.microbatches)}
    assert done["forward"] == done["backward"] == wanted
    assert done["returned"] == {m: m % schedule.ranks for m in range(schedule.microbatches)}


@given(schedules())
def test_passes_that_are_none_need_a_slot_of_their_own_only_where_all_are_taken(schedule):
    waste = columns(schedule)["keep"].max() + 1 - schedule.num_residuals
    assert waste in (0, 1)
    if schedule.name in ("1f1b", "interleaved") and schedule.microbatches >= 2 * schedule.ranks:
        assert waste == 0


def play(schedule: Schedule) -> dict:
    """Run the table. A label is (stage, microbatch) of what it stands for."""
    table, ranks, last = columns(schedule), schedule.ranks, schedule.num_stages - 1
    stages = [[s for s, rank in enumerate(schedule.order.place) if rank == r] for r in range(ranks)]
    inputs, gradients, kept = ([{} for _ in range(ranks)] for _ in range(3))
    coming: list = [None] * ranks
    returning: list = [None] * ranks
    done: dict = {"forward": set(), "backward": set(), "returned": {}}
    for t in range(schedule.num_ticks):
        row = {name: column[t] for name, column in table.items()}
        if row["group"] >= 0:
            coming = [row["group"] * ranks + r for r in range(ranks)]
        y, dx = {}, {}
        for r in range(ranks):
            if (m := int(row["forward"][r])) < 0:
                if (row["forward"] >= 0).any():  # else no rank keeps anything
                    kept[r][int(row["keep"][r])] = "waste"
                continue
            stage = stages[r][row["forward_stage"][r]]
            found = (0, coming[0]) if r == 0 and row["first"] >= 0 else inputs[r][int(row["input"][r])]
            assert found == (stage, m)
            done["forward"].add((stage, m))
            kept[r][int(row["keep"][r])] = y[r] = (stage, m)
            assert (row["last"] == m) if stage == last else True
        if row["first"] >= 0:
            coming = coming[1:] + coming[:1]
        send(inputs, y, row, "input", ranks, lambda label: (label[0] + 1, label[1]))
        if row["last"] >= 0:
            gradients[schedule.order.place[-1]][int(row["head"][schedule.order.place[-1]])] = (last, int(row["last"]))
        for r in range(ranks):
            if (m := int(row["backward"][r])) < 0:
                continue
            stage = stages[r][row["backward_stage"][r]]
            assert kept[r][int(row["kept"][r])] == gradients[r][int(row["gradient"][r])] == (stage, m)
            done["backward"].add((stage, m))
            dx[r] = (stage, m)
        send(gradients, dx, row, "gradient", ranks, lambda label: (label[0] - 1, label[1]))
        if row["first_backward"] >= 0:
            assert dx[0] == (0, row["first_backward"])
            returning[0] = int(row["first_backward"])
            returning = returning[1:] + returning[:1]
        if row["returns"] >= 0:
            done["returned"] |= {m: r for r, m in enumerate(returning) if m is not None and m // ranks == row["returns"]}
    if count := schedule.microbatches % ranks:
        returning = [returning[(r + ranks - count) % ranks] for r in range(ranks)]
        done["returned"] |= {m: r for r, m in enumerate(returning) if m is not None and m // ranks == schedule.microbatches // ranks}
    return done


def send(slots: list[dict], made: dict, row: dict, what: str, ranks: int, arrives) -> None:
    for name, way in WAYS.items():
        if (column := f"{what}_{name}") not in row:
            continue
        for r in range(ranks):
            source = (r - way) % ranks
            slots[r][int(row[column][r])] = arrives(made[source]) if source in made else "waste"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_loops_run_every_tick_once_and_in_order(ticks):
    found, at = [], 0
    for loop in loops(ticks):
        assert loop.first == at
        found += [kind for kind, count in loop.runs for _ in range(count)] * loop.repeats
        at += loop.ticks_of_a_turn * loop.repeats
    assert found == ticks


def test_the_steady_state_of_many_microbatches_is_one_loop():
    for name, virtual in (("1f1b", 1), ("interleaved", 2), ("v_shaped", 2)):
        few, many = (len(loops(kinds(build(name, 4, count, virtual)))) for count in (16, 64))
        assert few == many <= 8, name
