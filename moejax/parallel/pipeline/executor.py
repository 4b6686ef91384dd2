"""Runs a pipeline schedule inside shard_map: forward, backward and gradient sums of all microbatches, without a branch.

    prologue    microbatch m on rank m mod P, all at once; outputs wait in a ring that turns towards rank 0
    ticks       every rank runs every tick, with nothing in it where its table has none, and neighbours exchange after it; ticks of a
                kind (`moejax.parallel.pipeline.loops`) are a scan
    head        in the tick in which the last stage runs a microbatch forward, on all ranks, each with its share of the tokens
    prologue    backward, on the rank that ran it: gradients come back in a second ring

What stages keep waits in as many slots as the schedule needs (`num_residuals`), whatever M is; the rings hold a rank's share of the
prologue, M / P microbatches each. On one rank a tick is a microbatch from the prologue to its gradient, and nothing waits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moejax.parallel.pipeline.loops import Loop, loops
from moejax.parallel.pipeline.schedule import Schedule
from moejax.parallel.pipeline.table import columns, kinds
from moejax.parallel.scopes import BETWEEN_STAGES, GRADIENT_SUMS

Tree = Any


class Parts(NamedTuple):
    """The model in three pieces, as functions on this rank's arrays. m is the microbatch, number the stage among those of the rank.

    All integers are traced int32. With is_real False there is nothing to do: x or dy is of no meaning, and statistics, sums and what is
    added to sums have to be zero.

    prologue: (weights, m) -> (x [B, T, D], kept).
    prologue_backward: (weights, kept, m, dx, sums, is_real) -> sums.
    stage: (weights, x, m, number, is_real, slots) -> (y like x, statistics, kept). slots: None, or arrays with one more leading dim, and
        the index at which what this pass keeps is put in them.
    stage_backward: (weights, kept, slot, m, number, is_real, dy, sums) -> (dx, sums).
    stage_forward: (weights, x, m, number, is_real) -> y, for evaluation.
    head: (weights, y [n, D], m, first, is_real) -> (float32 scalar of the loss, sums), for tokens first, first + 1, ... of the
        microbatch, which may lie past its end.
    merge: (sums of statistics of all stages here, new ones, number) -> sums.
    """

    prologue: Callable[[Tree, Array], tuple[Array, Tree]]
    prologue_backward: Callable[..., Tree]
    stage: Callable[..., tuple[Array, Tree, Tree]]
    stage_backward: Callable[..., tuple[Array, Tree]]
    stage_forward: Callable[..., Array]
    head: Callable[..., tuple[Array, Tree]]
    merge: Callable[[Tree, Tree, Array], Tree]


class Weights(NamedTuple):
    """Of each piece. What two of them share gets a gradient from each."""

    prologue: Tree
    stage: Tree
    head: Tree


class Result(NamedTuple):
    """Sums over microbatches on this rank: float32 gradients like the weights, merged statistics of its stages, sums of the head."""

    gradients: Weights
    statistics: Tree
    sums: Tree


def can_execute(schedule: Schedule) -> bool:
    """Whether `run` knows the schedule: one with whole backward passes."""
    return schedule.order.weight is None


def run(schedule: Schedule, parts: Parts, weights: Weights, statistics: Tree, *, axis: str = "pp") -> Result:
    """Gradients of the sum over microbatches of all scalars, inside shard_map over `axis`.

    Args:
        schedule: one that `can_execute`.
        statistics: where their sums start.
    """
    if not can_execute(schedule):
        raise ValueError(f"{schedule.name} makes gradients of weights in passes of their own, which cannot be executed")
    if schedule.ranks == 1:
        return _alone(schedule.microbatches, parts, weights, statistics)
    return _Pipeline(schedule, parts, weights, axis).run(statistics)


def evaluate(schedule: Schedule, parts: Parts, weights: Weights, *, axis: str = "pp") -> Tree:
    """Sums of the head over all microbatches on this rank: the forward passes of the schedule, without what they would keep."""
    if schedule.ranks == 1:
        return _forward_alone(schedule.microbatches, parts, weights)
    return _Pipeline(schedule, parts, weights, axis).evaluate()


def _alone(microbatches: int, parts: Parts, weights: Weights, statistics: Tree) -> Result:
    real, first = jnp.bool_(True), jnp.int32(0)

    def add(result: Result, m):
        x, kept_before = parts.prologue(weights.prologue, m)
        y, found, kept = parts.stage(weights.stage, x, m, first, None, None)
        dy, dw_head, sums = _head_gradients(parts, weights.head, y.reshape(-1, y.shape[-1]), m, first, real)
        dy, head = _added_first(dy, result.gradients.head, dw_head)
        dx, stage = parts.stage_backward(weights.stage, kept, None, m, first, None, dy.reshape(y.shape), result.gradients.stage)
        prologue = parts.prologue_backward(weights.prologue, kept_before, m, dx, result.gradients.prologue, None)
        return Result(Weights(prologue, stage, head), parts.merge(result.statistics, found, first), _added(result.sums, sums)), None

    x, _ = jax.eval_shape(parts.prologue, weights.prologue, first)
    start = Result(_zeros(weights, jnp.float32), statistics, _zeros(_sums_of_head(parts, weights, x, 1)))
    with jax.named_scope("ticks"):
        return lax.scan(add, start, jnp.arange(microbatches, dtype=jnp.int32))[0]


def _forward_alone(microbatches: int, parts: Parts, weights: Weights) -> Tree:
    real, first = jnp.bool_(True), jnp.int32(0)

    def add(sums, m):
        y = parts.stage_forward(weights.stage, parts.prologue(weights.prologue, m)[0], m, first, None)
        return _added(sums, parts.head(weights.head, y.reshape(-1, y.shape[-1]), m, first, real)[1]), None

    x, _ = jax.eval_shape(parts.prologue, weights.prologue, first)
    return lax.scan(add, _zeros(_sums_of_head(parts, weights, x, 1)), jnp.arange(microbatches, dtype=jnp.int32))[0]


class _Pipeline:
    """One schedule with its parts and weights, on several ranks."""

    def __init__(self, schedule: Schedule, parts: Parts, weights: Weights, axis: str):
        self.schedule, self.parts, self.weights, self.axis = schedule, parts, weights, axis
        self.ranks, self.me = schedule.ranks, lax.axis_index(axis)
        self.last_rank = schedule.order.place[-1]
        groups = -(-schedule.microbatches // self.ranks)
        self.mine = jnp.arange(groups, dtype=jnp.int32) * self.ranks + self.me  # microbatches of this rank's prologue
        with jax.named_scope(BETWEEN_STAGES):
            self.first = lax.map(lambda m: parts.prologue(weights.prologue, jnp.minimum(m, schedule.microbatches - 1))[0], self.mine)
        self.zero = jnp.zeros(self.first.shape[1:], self.first.dtype)

    def run(self, statistics: Tree) -> Result:
        table, parts, weights = columns(self.schedule), self.parts, self.weights
        kept = jax.eval_shape(
            lambda w, x: parts.stage(w, x, jnp.int32(0), jnp.int32(0), jnp.bool_(True), None)[2], weights.stage, self.zero
        )
        slots = int(table["keep"].max()) + 1
        carry = self._start_forward() | {
            "gradients": self._slots(self.schedule.num_gradients + 1),
            "kept": jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), kept),
            "returning": self.zero,
            "returned": jnp.zeros_like(self.first),
            "stage": _zeros(weights.stage, jnp.float32),
            "head": _zeros(weights.head, jnp.float32),
            "statistics": statistics,
        }
        for loop in loops(kinds(self.schedule)):
            carry = _looped(self._tick, loop, table, carry)
        gradients = Weights(self._prologue_backward(self._last_group(carry)), carry["stage"], carry["head"])
        return Result(gradients, carry["statistics"], carry["sums"])

    def evaluate(self) -> Tree:
        carry = self._start_forward()
        for loop in loops([(f, h) for f, _, h in kinds(self.schedule) if f]):
            carry = _looped(self._forward_tick, loop, _ticks_with_forward(columns(self.schedule)), carry)
        return carry["sums"]

    def _start_forward(self) -> dict:
        sums = _zeros(_sums_of_head(self.parts, self.weights, self.zero, self.ranks))
        return {"inputs": self._slots(self.schedule.num_inputs + 1), "coming": self.zero, "sums": sums}

    def _slots(self, count: int) -> Array:
        return jnp.zeros((count, *self.zero.shape), self.zero.dtype)

    def _tick(self, kind: tuple[bool, bool, bool], carry: dict, row: dict) -> dict:
        """One tick of every rank: its part of the table's row."""
        has_forward, has_backward, has_head = kind
        carry, mine = dict(carry), self._mine(row)
        if has_forward:
            x, is_real, carry["coming"] = self._input(carry, row, mine)
            m, number = jnp.maximum(mine["forward"], 0), mine["forward_stage"]
            y, found, carry["kept"] = self.parts.stage(self.weights.stage, x, m, number, is_real, (carry["kept"], mine["keep"]))
            carry["statistics"] = self.parts.merge(carry["statistics"], found, number)
            carry["inputs"] = self._sent(carry["inputs"], y, "input", mine)
            if has_head:
                dy, dw, sums = self._head(y, row)
                carry["sums"] = _added(carry["sums"], sums)
                dy, carry["head"] = _added_first(dy, carry["head"], dw)
                carry["gradients"] = carry["gradients"].at[mine["head"]].set(dy)
        if has_backward:
            m, is_real = jnp.maximum(mine["backward"], 0), mine["backward"] >= 0
            dy = carry["gradients"][mine["gradient"]]
            passed = m, mine["backward_stage"], is_real, jnp.where(is_real, dy, jnp.zeros((), dy.dtype))
            dx, carry["stage"] = self.parts.stage_backward(self.weights.stage, carry["kept"], mine["kept"], *passed, carry["stage"])
            carry["gradients"] = self._sent(carry["gradients"], dx, "gradient", mine)
            carry |= self._returned(carry, dx, row)
        return carry

    def _forward_tick(self, kind: tuple[bool, bool], carry: dict, row: dict) -> dict:
        carry, mine = dict(carry), self._mine(row)
        x, is_real, carry["coming"] = self._input(carry, row, mine)
        y = self.parts.stage_forward(self.weights.stage, x, jnp.maximum(mine["forward"], 0), mine["forward_stage"], is_real)
        carry["inputs"] = self._sent(carry["inputs"], y, "input", mine)
        if kind[1]:
            _, sums = self.parts.head(self.weights.head, *self._share(y, row))
            carry["sums"] = _added(carry["sums"], sums)
        return carry

    def _mine(self, row: dict) -> dict:
        return {name: column[self.me] for name, column in row.items() if column.ndim}

    def _input(self, carry: dict, row: dict, mine: dict) -> tuple[Array, Array, Array]:
        """The stage's input, zero without one; whether there is one; and the ring of the prologue after the tick."""
        enters = lax.dynamic_index_in_dim(self.first, jnp.maximum(row["group"], 0), keepdims=False)
        coming = jnp.where(row["group"] >= 0, enters, carry["coming"])
        is_real, is_first = mine["forward"] >= 0, (self.me == 0) & (row["first"] >= 0)
        x = jnp.where(is_first, coming, carry["inputs"][mine["input"]])
        x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
        return x, is_real, jnp.where(row["first"] >= 0, self._turn(coming, -1), coming)

    def _sent(self, slots: Array, value: Array, what: str, mine: dict) -> Array:
        """Slots with what arrives by each channel that the table uses."""
        for name, way in (("next", 1), ("previous", -1), ("here", 0)):
            if (column := f"{what}_{name}") in mine:
                with jax.named_scope(BETWEEN_STAGES):
                    slots = slots.at[mine[column]].set(self._turn(value, way))
        return slots

    def _head(self, y: Array, row: dict) -> tuple[Array, Tree, Tree]:
        """Gradient of y, if it is the last stage's here; gradients of the head's weights from this rank's tokens, and their sums."""
        dpart, dw, sums = _head_gradients(self.parts, self.weights.head, *self._share(y, row))
        dy = lax.all_gather(dpart, self.axis, tiled=True)[: y.shape[0] * y.shape[1]].reshape(y.shape)
        return dy, dw, sums

    def _share(self, y: Array, row: dict) -> tuple[Array, Array, Array, Array]:
        """This rank's tokens of the last stage's output, zero if it has none; microbatch, first token, and whether it has one."""
        tokens, is_real = y.shape[0] * y.shape[1], row["last"] >= 0
        share = -(-tokens // self.ranks)
        spread = jnp.where((self.me == self.last_rank) & is_real, y.reshape(tokens, -1), jnp.zeros((), y.dtype))
        spread = jnp.pad(spread, ((0, share * self.ranks - tokens), (0, 0)))
        part = lax.psum_scatter(spread, self.axis, scatter_dimension=0, tiled=True)
        return part, jnp.maximum(row["last"], 0), self.me * share, is_real

    def _returned(self, carry: dict, dx: Array, row: dict) -> dict:
        """The ring of the prologue's gradients after the tick, and what has come all the way."""
        has_first = row["first_backward"] >= 0
        ring = self._turn(jnp.where(self.me == 0, dx, carry["returning"]), -1)
        returning, group = jnp.where(has_first, ring, carry["returning"]), jnp.maximum(row["returns"], 0)
        through = jnp.where(row["returns"] >= 0, returning, carry["returned"][group])
        return {"returning": returning, "returned": carry["returned"].at[group].set(through)}

    def _last_group(self, carry: dict) -> Array:
        """A last group that is not full has not turned all the way; rank r has microbatch r of it after the rest of the way."""
        if (count := self.schedule.microbatches % self.ranks) == 0:
            return carry["returned"]
        return carry["returned"].at[-1].set(self._turn(carry["returning"], count - self.ranks))

    def _prologue_backward(self, returned: Array) -> Tree:
        parts, weights = self.parts, self.weights.prologue

        def add(sums, group):
            m, dx = group
            is_real, m = m < self.schedule.microbatches, jnp.minimum(m, self.schedule.microbatches - 1)
            _, kept = parts.prologue(weights, m)
            return parts.prologue_backward(weights, kept, m, jnp.where(is_real, dx, jnp.zeros((), dx.dtype)), sums, is_real), None

        with jax.named_scope("prologue_backward"):
            return lax.scan(add, _zeros(weights, jnp.float32), (self.mine, returned))[0]

    def _turn(self, x: Array, way: int) -> Array:
        """What each rank holds, moved that many ranks on."""
        if way % self.ranks == 0:
            return x
        return lax.ppermute(x, self.axis, [(rank, (rank + way) % self.ranks) for rank in range(self.ranks)])


def _looped(tick: Callable[[Any, dict, dict], dict], loop: Loop, table: Tree, carry: dict) -> dict:
    """carry after all ticks of a loop."""

    def turn(carry: dict, rows: dict) -> tuple[dict, None]:
        first = 0
        for kind, count in loop.runs:
            part = jax.tree.map(lambda a, at=first, n=count: a[at : at + n], rows)
            carry, _ = lax.scan(lambda c, row, k=kind: (tick(k, c, row), None), carry, part)
            first += count
        return carry, None

    def rows(column):
        size = loop.ticks_of_a_turn
        return jnp.asarray(column[loop.first : loop.first + size * loop.repeats]).reshape(loop.repeats, size, *column.shape[1:])

    with jax.named_scope("ticks"):
        return lax.scan(turn, carry, jax.tree.map(rows, table))[0]


def _ticks_with_forward(table: Tree) -> Tree:
    is_forward = (table["forward"] >= 0).any(axis=1)
    return {name: column[is_forward] for name, column in table.items()}


def _head_gradients(parts: Parts, weights: Tree, y: Array, m: Array, first: Array, is_real: Array) -> tuple[Array, Tree, Tree]:
    """Of y and of the weights; and the sums."""
    _, vjp, sums = jax.vjp(partial(parts.head, m=m, first=first, is_real=is_real), weights, y, has_aux=True)
    dw, dy = vjp(jnp.float32(1))
    return dy, dw, sums


def _sums_of_head(parts: Parts, weights: Weights, x: Any, ranks: int) -> Tree:
    part = jax.ShapeDtypeStruct((-(-x.shape[0] * x.shape[1] // ranks), x.shape[-1]), x.dtype)
    return jax.eval_shape(parts.head, weights.head, part, jnp.int32(0), jnp.int32(0), jnp.bool_(True))[1]


def _zeros(tree: Tree, dtype=None) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, dtype or a.dtype), tree)


def _added_first(dy: Array, sums: Tree, new: Tree) -> tuple[Array, Tree]:
    """dy, and sums with the head's gradients added before anything is done with dy: XLA would keep them until the stage's are there."""
    with jax.named_scope(GRADIENT_SUMS):
        return lax.optimization_barrier((dy, _added(sums, new)))


def _added(sums: Tree, new: Tree) -> Tree:
    with jax.named_scope(GRADIENT_SUMS):
        return jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, new)
