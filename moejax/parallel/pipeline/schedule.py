"""A pipeline as a table: in each tick a rank runs at most one forward and one backward pass of one stage and microbatch. Pure NumPy.

    rank 0   F0    F1    F2    F3B0  ..B1        stage s of P * V lies on rank place[s]; what it makes in tick t
    rank 1         F0    F1B0  F2B1  F3B2        is there for its neighbour in tick t + 1

Neighbours exchange in every tick, so all ranks are in step and a tick costs what its busiest rank does: a forward pass if any rank runs
one, a backward pass if any rank runs one. That is what `cost` counts, and what a schedule should make small.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Place = tuple[int, int]
"""A stage and a microbatch."""

Ticks = dict[Place, int]
"""When each of them runs."""


class Order(NamedTuple):
    """What a schedule decides. place: the rank of each stage. forward, backward: the tick of each stage and microbatch.

    weight: None if the backward pass makes the gradients of weights too; else `backward` makes those of activations alone, and weights
    follow here.
    """

    place: tuple[int, ...]
    forward: Ticks
    backward: Ticks
    weight: Ticks | None = None


Maker = Callable[[int, int, int], Order]
"""(ranks, microbatches, virtual stages of a rank) -> order; see `moejax.parallel.pipeline.schedules`."""


@dataclass(frozen=True)
class Schedule:
    """An order that was checked, and what its executor has to know.

    num_inputs, num_gradients, num_residuals: slots of one rank for activations that came in, gradients that came in, and results that
    wait for a backward pass; each as many as are needed at once on the rank that needs most.
    input_slot, gradient_slot, residual_slot: slot of each stage and microbatch.
    """

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int
    order: Order
    num_inputs: int
    num_gradients: int
    num_residuals: int
    input_slot: Ticks
    gradient_slot: Ticks
    residual_slot: Ticks

    @property
    def num_stages(self) -> int:
        return self.ranks * self.virtual_stages

    @property
    def num_ticks(self) -> int:
        return 1 + max(tick for ticks in self._kinds().values() for tick in ticks.values())

    def grid(self, kind: str) -> Int[np.ndarray, "ticks ranks 2"]:
        """Stage and microbatch of each tick and rank for kind F, B or W; -1 where a rank has none."""
        found = np.full((self.num_ticks, self.ranks, 2), -1, np.int32)
        for (stage, microbatch), tick in self._kinds().get(kind, {}).items():
            found[tick, self.order.place[stage]] = stage, microbatch
        return found

    def cost(self, forward: float = 1.0, backward: float = 2.0, weight: float = 1.0) -> float:
        """Time of the table in lock step.

        Arguments are times of a rank's whole part of the model; `weight` is the part of `backward` that W takes where it is on its own.
        """
        whole = {"F": forward, "B": backward - (weight if self.order.weight is not None else 0), "W": weight}
        busy = {kind: (self.grid(kind)[:, :, 0] >= 0).any(axis=1).sum() for kind in self._kinds()}
        return sum(whole[kind] * int(count) for kind, count in busy.items()) / self.virtual_stages

    def bubble(self, forward: float = 1.0, backward: float = 2.0, weight: float = 1.0) -> float:
        """Share of the time in which a rank waits."""
        return 1 - self.microbatches * (forward + backward) / self.cost(forward, backward, weight)

    def last_use(self, stage: int, microbatch: int) -> int:
        """The tick in which what a forward pass kept is needed for the last time."""
        return _last(self.order)[stage, microbatch]

    def in_flight(self) -> list[int]:
        """For each rank, the most stages and microbatches whose forward pass is done and whose last backward pass is not."""
        return [_colour(list(_waiting(self.order, rank)))[1] for rank in range(self.ranks)]

    def free_running_cost(self, forward: float = 1.0, backward: float = 2.0, weight: float = 1.0) -> float:
        """Time if ranks ran the same order without keeping step, each pass as soon as its rank is free and its input is there."""
        order, last = self.order, self.num_stages - 1
        length = {"F": forward, "B": backward - (weight if order.weight is not None else 0), "W": weight}
        # In one tick a rank does its passes in this order; the last stage turns around within a tick.
        passes = sorted((tick, "FBW".index(kind), kind, *key) for kind, ticks in self._kinds().items() for key, tick in ticks.items())
        free = [0.0] * self.ranks
        done: dict[tuple[str, int, int], float] = {}
        for _, _, kind, stage, microbatch in passes:
            before = {"F": ("F", stage - 1), "B": ("F", stage) if stage == last else ("B", stage + 1), "W": ("B", stage)}[kind]
            start = max(free[order.place[stage]], done.get((*before, microbatch), 0.0))
            done[kind, stage, microbatch] = free[order.place[stage]] = start + length[kind] / self.virtual_stages
        return max(free)

    def _kinds(self) -> dict[str, Ticks]:
        kinds = {"F": self.order.forward, "B": self.order.backward}
        return kinds if self.order.weight is None else kinds | {"W": self.order.weight}


def finish(name: str, ranks: int, microbatches: int, virtual_stages: int, order: Order) -> Schedule:
    """The schedule of an order that keeps all rules (`moejax.parallel.pipeline.validate`), with slots for what waits."""
    (inputs, num_inputs), (gradients, num_gradients), (residuals, num_residuals) = (
        _slots([list(needs(order, rank)) for rank in range(ranks)]) for needs in (_arriving, _returning, _waiting)
    )
    return Schedule(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        order=order,
        num_inputs=num_inputs,
        num_gradients=num_gradients,
        num_residuals=num_residuals,
        input_slot=inputs,
        gradient_slot=gradients,
        residual_slot=residuals,
    )


Interval = tuple[int, int, Place]
"""First and last tick in which something is needed, and what it is."""


def _last(order: Order) -> Ticks:
    return order.backward if order.weight is None else {key: max(tick, order.backward[key]) for key, tick in order.weight.items()}


def _waiting(order: Order, rank: int) -> Iterator[Interval]:
    end = _last(order)
    return ((tick, end[key], key) for key, tick in order.forward.items() if order.place[key[0]] == rank)


def _arriving(order: Order, rank: int) -> Iterator[Interval]:
    """Inputs of a rank's stages, from the tick after they were made until the stage is through with them."""
    for (stage, microbatch), tick in order.forward.items():
        if order.place[stage] == rank and stage > 0:
            yield order.forward[stage - 1, microbatch] + 1, tick, (stage, microbatch)


def _returning(order: Order, rank: int) -> Iterator[Interval]:
    """Gradients of the outputs of a rank's stages. That of the last one comes from the head, in the tick of its forward pass."""
    end, last = _last(order), len(order.place) - 1
    for stage, m in order.backward:
        if order.place[stage] == rank:
            start = order.forward[stage, m] if stage == last else order.backward[stage + 1, m] + 1
            yield start, end[stage, m], (stage, m)


def _slots(of_ranks: list[list[Interval]]) -> tuple[Ticks, int]:
    """Slot of everything that waits, on whichever rank, and the most slots that a rank needs."""
    coloured = [_colour(intervals) for intervals in of_ranks]
    return {key: slot for slots, _ in coloured for key, slot in slots.items()}, max(count for _, count in coloured)


def _colour(intervals: list[Interval]) -> tuple[Ticks, int]:
    """Slots such that what is needed at the same time lies in different ones: as few as possible (interval colouring)."""
    free_from: list[int] = []
    slots: Ticks = {}
    for start, end, key in sorted(intervals):
        slot = next((i for i, tick in enumerate(free_from) if tick <= start), len(free_from))
        free_from[slot : slot + 1] = [end + 1]
        slots[key] = slot
    return slots, len(free_from)
