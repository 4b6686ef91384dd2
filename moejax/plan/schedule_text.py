"""A pipeline schedule as text: the table, what it costs, and what waits."""

from collections.abc import Iterator

from moejax.parallel.pipeline import SCHEDULES, Schedule

_WIDTH = 120
"""Letters of a line; a longer table goes on below."""


def lines(schedule: Schedule) -> Iterator[str]:
    """The schedule, line by line."""
    s = schedule
    stages = f", {s.virtual_stages} stages on each" if s.virtual_stages > 1 else ""
    yield f"{s.name}: {_count(s.ranks, 'rank')}{stages}, {_count(s.microbatches, 'microbatch', 'es')}, {_count(s.num_ticks, 'tick')}"
    weights = "; W: gradients of weights" if s.order.weight is not None else ""
    yield f"F2: forward pass of microbatch 2; B: backward{weights}" + ("; F2.1: stage 1 of the rank" if stages else "")
    yield ""
    yield from _table(s)
    yield ""
    formula = SCHEDULES[s.name].theory(s.ranks, s.microbatches, s.virtual_stages) if s.name in SCHEDULES else None
    of_paper = f"{formula:.1%} by the formula of its paper" if formula is not None else "no formula for these numbers"
    free = 1 - 3 * s.microbatches / s.free_running_cost()
    yield f"ranks wait {s.bubble():.1%} of the time in lock step; {free:.1%} if none waited for the others' tick; {of_paper}"
    yield "  (a backward pass taken as two forward passes)"
    most = ", ".join(map(str, s.in_flight()))
    part = f", each of 1/{s.virtual_stages} of a rank's blocks" if s.virtual_stages > 1 else ""
    yield f"activations under way, rank by rank: {most} microbatches{part}"
    yield f"slots of a rank: {s.num_residuals} for them, {s.num_inputs} for inputs, {s.num_gradients} for gradients on the way"


def cell(schedule: Schedule, kind: str, stage: int, microbatch: int) -> str:
    """What a pass is called: its kind and microbatch, and the stage of the rank if there are several."""
    if stage < 0:
        return ""
    mine = [s for s, rank in enumerate(schedule.order.place) if rank == schedule.order.place[stage]]
    return f"{kind}{microbatch}" + (f".{mine.index(stage)}" if schedule.virtual_stages > 1 else "")


def _table(s: Schedule) -> Iterator[str]:
    grids = {kind: s.grid(kind) for kind in ("F", "B", "W")}
    rows = [
        ["".join(cell(s, kind, *grid[tick, rank]) for kind, grid in grids.items()) or "." for tick in range(s.num_ticks)]
        for rank in range(s.ranks)
    ]
    width = max(len(text) for row in rows for text in row)
    most = max(1, (_WIDTH - len("rank 000 ")) // (width + 1))
    for first in range(0, s.num_ticks, most):
        if s.num_ticks > most:
            yield f"ticks {first} to {min(first + most, s.num_ticks) - 1}"
        for rank, row in enumerate(rows):
            yield f"rank {rank:<3} " + " ".join(f"{text:<{width}}" for text in row[first : first + most]).rstrip()


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + (plural if number != 1 else "")
