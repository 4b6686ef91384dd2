"""A schedule as arrays that every rank reads its part of the ticks from."""

import numpy as np

from moejax.parallel.pipeline.schedule import Schedule

Columns = dict[str, np.ndarray]

CHANNELS = ("next", "previous", "here")
"""Where what a rank made goes: to the rank after it, to the one before it (in a ring), or to another of its own stages."""


def columns(schedule: Schedule) -> Columns:
    """int32 arrays [ticks, ranks], or [ticks] for what concerns all ranks; -1 is nothing, and the last slot of each kind is for waste.

    forward, backward: microbatch; forward_stage, backward_stage: which of the rank's stages.
    input, keep: where a forward pass finds its input, and leaves what is kept. kept, gradient: where a backward pass finds them.
    input_CHANNEL, gradient_CHANNEL: where what arrives at the end of a tick is put; only for channels that are used.
    head: where the gradient of the last stage's output is put.
    first, last, first_backward: microbatch whose first stage runs forward, last stage forward, first stage backward.
    group: which P microbatches' prologue enters the ring before the tick; returns: which are through after it.
    """
    found = _empty(schedule)
    for (stage, m), tick in schedule.order.forward.items():
        _forward(schedule, found, stage, m, tick)
    for (stage, m), tick in schedule.order.backward.items():
        _backward(schedule, found, stage, m, tick)
    _fill_idle(schedule, found)
    return found


def kinds(schedule: Schedule) -> list[tuple[bool, bool, bool]]:
    """For each tick, whether any rank runs forward, whether any runs backward, and whether the last stage runs forward."""
    table = columns(schedule)
    forward, backward = ((table[name] >= 0).any(axis=1) for name in ("forward", "backward"))
    return [(bool(f), bool(b), bool(h)) for f, b, h in zip(forward, backward, table["last"] >= 0, strict=True)]


def channel(schedule: Schedule, source: int, target: int) -> str:
    """The way from one stage to its neighbour. Between two ranks both ways are one: forward passes take next, backward passes previous."""
    ways = dict(zip(CHANNELS, (1, -1, 0), strict=True))
    if target < source:
        ways = {"previous": -1, "next": 1, "here": 0}
    turn = schedule.order.place[target] - schedule.order.place[source]
    if turn == 0:
        return "here"
    return next(name for name, way in ways.items() if (turn - way) % schedule.ranks == 0)


def _empty(schedule: Schedule) -> Columns:
    ticks, ranks, last = schedule.num_ticks, schedule.ranks, schedule.num_stages - 1
    wide = {
        "forward": -1,
        "forward_stage": 0,
        "backward": -1,
        "backward_stage": 0,
        "input": schedule.num_inputs,
        "keep": schedule.num_residuals,
        "kept": 0,
        "gradient": schedule.num_gradients,
        "head": schedule.num_gradients,
    }
    wide |= {f"input_{channel(schedule, s, s + 1)}": schedule.num_inputs for s in range(last)}
    wide |= {f"gradient_{channel(schedule, s + 1, s)}": schedule.num_gradients for s in range(last)}
    found = {name: np.full((ticks, ranks), value, np.int32) for name, value in wide.items()}
    return found | {name: np.full(ticks, -1, np.int32) for name in ("first", "last", "first_backward", "group", "returns")}


def _forward(schedule: Schedule, found: Columns, stage: int, m: int, tick: int) -> None:
    order, rank, last = schedule.order, schedule.order.place[stage], schedule.num_stages - 1
    found["forward"][tick, rank] = m
    found["forward_stage"][tick, rank] = _number(order.place, stage)
    found["keep"][tick, rank] = schedule.residual_slot[stage, m]
    if stage == 0:
        found["first"][tick] = m
        if m % schedule.ranks == 0:
            found["group"][tick] = m // schedule.ranks
    else:
        slot, made = schedule.input_slot[stage, m], order.forward[stage - 1, m]
        found["input"][tick, rank] = found[f"input_{channel(schedule, stage - 1, stage)}"][made, rank] = slot
    if stage == last:
        found["last"][tick] = m
        found["head"][tick, rank] = schedule.gradient_slot[stage, m]


def _backward(schedule: Schedule, found: Columns, stage: int, m: int, tick: int) -> None:
    order, rank = schedule.order, schedule.order.place[stage]
    found["backward"][tick, rank] = m
    found["backward_stage"][tick, rank] = _number(order.place, stage)
    found["kept"][tick, rank] = schedule.residual_slot[stage, m]
    found["gradient"][tick, rank] = slot = schedule.gradient_slot[stage, m]
    if stage < schedule.num_stages - 1:
        found[f"gradient_{channel(schedule, stage + 1, stage)}"][order.backward[stage + 1, m], rank] = slot
    if stage == 0:
        found["first_backward"][tick] = m
        if m % schedule.ranks == schedule.ranks - 1:
            found["returns"][tick] = m // schedule.ranks


def _number(place: tuple[int, ...], stage: int) -> int:
    """Which of its rank's stages this one is."""
    return place[:stage].count(place[stage])


def _fill_idle(schedule: Schedule, found: Columns) -> None:
    """Let passes that are none leave what they keep where nothing waits, if there always is such a slot; else in one for waste."""
    taken = np.zeros((schedule.num_ticks, schedule.ranks, schedule.num_residuals), bool)
    for (stage, m), slot in schedule.residual_slot.items():
        start, end = schedule.order.forward[stage, m], schedule.last_use(stage, m)
        taken[start : end + 1, schedule.order.place[stage], slot] = True
    idle = found["forward"] < 0
    is_free = ~taken.all(axis=-1)
    matters = idle & (found["forward"] >= 0).any(axis=1)[:, None]  # other ticks write nothing
    if (is_free | ~matters).all():
        found["keep"] = np.where(matters, taken.argmin(axis=-1), np.where(idle, 0, found["keep"])).astype(np.int32)
