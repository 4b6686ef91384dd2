"""Runs a pipeline schedule inside shard_map: forward, backward and gradient sums of all microbatches, without a branch.

    prologue    microbatch m on rank m mod P, all at once; outputs wait in a ring that turns towards rank 0
    ticks       [forward only][forward and backward][backward only], one scan each; every rank runs every tick, on zeros where its
                table has nothing, and neighbours exchange after it
    head        in the tick in which the last stage runs a microbatch backward, on all ranks, each with its share of the tokens
    prologue    backward, on the rank that ran it: gradients come back in a second ring

Stages are computed again in their backward pass, from the inputs that waited. As many of those wait as the schedule needs
(`num_residuals`), whatever M is; the rings hold a rank's share of the prologue, M / P microbatches each.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from moejax.parallel.pipeline.schedule import Schedule

Tree = Any


class Parts(NamedTuple):
    """The model in three pieces, as functions on this rank's arrays. m is the microbatch, a traced int32.

    prologue: (weights, m) -> x [B, T, D].
    stage: (weights, x, m, is_real) -> (y like x, a float32 scalar to add to the loss, statistics). On an idle tick is_real is False and
        x is zero; then scalar, statistics and gradients have to be zero.
    head: (weights, y [n, D], m, first, is_real) -> (float32 scalar of the loss, sums), for tokens first, first + 1, ... of the
        microbatch, which may lie past its end; with is_real False both are zero.
    merge: (sums of statistics, new ones) -> sums.
    """

    prologue: Callable[[Tree, Array], Array]
    stage: Callable[[Tree, Array, Array, Array], tuple[Array, Array, Tree]]
    head: Callable[..., tuple[Array, Tree]]
    merge: Callable[[Tree, Tree], Tree]


class Result(NamedTuple):
    """Sums over microbatches on this rank: float32 gradients of each piece's weights, merged statistics of its stage, sums of the head."""

    prologue: Tree
    stage: Tree
    head: Tree
    statistics: Tree
    sums: Tree


def can_execute(schedule: Schedule) -> bool:
    """Whether `run` knows the schedule: one stage on each rank, in order, and whole backward passes."""
    return schedule.order.place == tuple(range(schedule.ranks)) and schedule.order.weight is None


def run(schedule: Schedule, parts: Parts, weights: tuple[Tree, Tree, Tree], *, axis: str = "pp") -> Result:
    """Gradients of the sum over microbatches of all scalars, inside shard_map over `axis`.

    Args:
        schedule: one that `can_execute`.
        weights: of prologue, stage and head. What two of them share gets a gradient from each.
    """
    if not can_execute(schedule):
        raise ValueError(f"{schedule.name} with {schedule.virtual_stages} stages on a rank cannot be executed yet")
    ranks, me = schedule.ranks, lax.axis_index(axis)
    rows = _rows(schedule)
    groups = -(-schedule.microbatches // ranks)
    mine = jnp.minimum(jnp.arange(groups, dtype=jnp.int32) * ranks + me, schedule.microbatches - 1)
    first = lax.map(partial(parts.prologue, weights[0]), mine)
    zero, shared = jnp.zeros(first.shape[1:], first.dtype), jax.eval_shape(parts.head, weights[2], *_head_arguments(first, ranks))
    statistics = jax.eval_shape(lambda w, x: parts.stage(w, x, jnp.int32(0), jnp.bool_(True))[2], weights[1], zero)
    carry = {
        "inputs": jnp.zeros((schedule.num_inputs + 1, *zero.shape), zero.dtype),
        "gradients": jnp.zeros((schedule.num_gradients + 1, *zero.shape), zero.dtype),
        "kept": jnp.zeros((schedule.num_residuals + 1, *zero.shape), zero.dtype),
        "coming": zero,
        "returning": zero,
        "returned": jnp.zeros_like(first),
        "stage": _zeros(weights[1], jnp.float32),
        "head": _zeros(weights[2], jnp.float32),
        "statistics": _zeros(statistics),
        "sums": _zeros(shared[1]),
    }
    tick = partial(_tick, parts, weights, first, ranks, axis)
    for (is_forward, is_backward), same in itertools.groupby(range(schedule.num_ticks), key=lambda t: _phase(rows, t)):
        ticks = list(same)
        scanned = jax.tree.map(lambda table, t=ticks: jnp.asarray(table[t[0] : t[-1] + 1]), rows)
        with jax.named_scope("ticks"):
            carry, _ = lax.scan(lambda c, row, f=is_forward, b=is_backward: (tick(c, row, f, b), None), carry, scanned)
    returned = _last_group(carry["returned"], carry["returning"], schedule.microbatches, ranks, axis)
    prologue = _prologue_backward(parts, weights[0], returned, schedule.microbatches, ranks, me)
    return Result(prologue, carry["stage"], carry["head"], carry["statistics"], carry["sums"])


def forward(stage: Callable[[Array], Array], x: Array, ranks: int, *, axis: str = "pp") -> Array:
    """x through the stages of all ranks, inside shard_map over `axis`; the result is right on rank 0 alone.

    Every rank runs its stage P times, and only the pass that x has reached counts: the forward-only table of one microbatch.
    """

    def turn(x, _):
        return _turn(stage(x), ranks, axis, towards_last=True), None

    return lax.scan(turn, x, length=ranks)[0]


def _tick(parts: Parts, weights, first, ranks: int, axis: str, carry: dict, row: dict, is_forward: bool, is_backward: bool) -> dict:
    """One tick of every rank: its table's row, which holds all ranks' entries."""
    me, carry = lax.axis_index(axis), dict(carry)
    mine = {name: column[me] if column.ndim else column for name, column in row.items()}
    if is_forward:
        coming = jnp.where(
            row["group"] >= 0, lax.dynamic_index_in_dim(first, jnp.maximum(row["group"], 0), keepdims=False), carry["coming"]
        )
        is_real = mine["forward"] >= 0
        x = jnp.where(me == 0, coming, carry["inputs"][mine["input"]])
        x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
        y, _, found = parts.stage(weights[1], x, jnp.maximum(mine["forward"], 0), is_real)
        carry["statistics"] = parts.merge(carry["statistics"], found)
        carry["kept"] = carry["kept"].at[mine["keep"]].set(x)
        carry["coming"] = jnp.where(row["forward"][0] >= 0, _turn(coming, ranks, axis), coming)
        carry["inputs"] = carry["inputs"].at[mine["input_arrives"]].set(_turn(y, ranks, axis, towards_last=True))
    if is_backward:
        dx, carry = _backward(parts, weights, ranks, axis, carry, row, mine)
        carry["gradients"] = carry["gradients"].at[mine["gradient_arrives"]].set(_turn(dx, ranks, axis))
        ring = _turn(jnp.where(me == 0, dx, carry["returning"]), ranks, axis)
        carry["returning"] = jnp.where(row["backward"][0] >= 0, ring, carry["returning"])
        whole = jnp.maximum(row["returns"], 0)
        kept = jnp.where(row["returns"] >= 0, carry["returning"], carry["returned"][whole])
        carry["returned"] = carry["returned"].at[whole].set(kept)
    return carry


def _backward(parts: Parts, weights, ranks: int, axis: str, carry: dict, row: dict, mine: dict) -> tuple[Array, dict]:
    """The stage again and backward, with the head in between if it is the last one. Returns the gradient of the stage's input."""
    me, is_real, microbatch = lax.axis_index(axis), mine["backward"] >= 0, jnp.maximum(mine["backward"], 0)
    x = jnp.where(is_real, carry["kept"][mine["kept"]], jnp.zeros((), carry["kept"].dtype))
    (y, scalar), stage_vjp = jax.vjp(lambda w, x: parts.stage(w, x, microbatch, is_real)[:2], weights[1], x)

    at_head = row["backward"][ranks - 1]
    tokens, share = _share(y, ranks)
    spread = jnp.where((me == ranks - 1) & (at_head >= 0), y.reshape(tokens, -1), jnp.zeros((), y.dtype))
    spread = jnp.pad(spread, ((0, share * ranks - tokens), (0, 0)))
    part = lax.psum_scatter(spread, axis, scatter_dimension=0, tiled=True)
    head = partial(parts.head, m=jnp.maximum(at_head, 0), first=me * share, is_real=at_head >= 0)
    _, head_vjp, sums = jax.vjp(head, weights[2], part, has_aux=True)
    dw_head, dpart = head_vjp(jnp.float32(1))
    dy = lax.all_gather(dpart, axis, tiled=True)[:tokens].reshape(y.shape)

    cotangent = jnp.where(me == ranks - 1, dy, carry["gradients"][mine["gradient"]])
    cotangent = jnp.where(is_real, cotangent, jnp.zeros((), y.dtype))
    dw, dx = stage_vjp((cotangent, is_real.astype(scalar.dtype)))
    return dx, carry | {
        "stage": _added(carry["stage"], dw),
        "head": _added(carry["head"], dw_head),
        "sums": _added(carry["sums"], sums),
    }


def _rows(schedule: Schedule) -> dict[str, np.ndarray]:
    """The table as arrays, [ticks, ranks] or, for what all ranks do together, [ticks]; -1 is nothing, the last slot is for waste.

    forward, backward: microbatch. input, keep: where a forward pass finds its input and leaves it; kept, gradient: where a backward pass
    finds them. input_arrives, gradient_arrives: where what a neighbour sends at the end of the tick is put. group: microbatches of the
    prologue that enter the ring before the tick; returns: those whose gradients are complete after it.
    """
    shape, order, ranks = (schedule.num_ticks, schedule.ranks), schedule.order, schedule.ranks
    waste = {
        "input": schedule.num_inputs,
        "input_arrives": schedule.num_inputs,
        "gradient": schedule.num_gradients,
        "gradient_arrives": schedule.num_gradients,
        "keep": schedule.num_residuals,
        "kept": schedule.num_residuals,
        "forward": -1,
        "backward": -1,
    }
    rows = {name: np.full(shape, value, np.int32) for name, value in waste.items()}
    group, returns = (np.full(schedule.num_ticks, -1, np.int32) for _ in range(2))
    for (stage, m), tick in order.forward.items():
        rows["forward"][tick, stage] = m
        rows["keep"][tick, stage] = schedule.residual_slot[stage, m]
        if stage > 0:
            rows["input"][tick, stage] = rows["input_arrives"][order.forward[stage - 1, m], stage] = schedule.input_slot[stage, m]
        elif m % ranks == 0:
            group[tick] = m // ranks
    for (stage, m), tick in order.backward.items():
        rows["backward"][tick, stage] = m
        rows["kept"][tick, stage] = schedule.residual_slot[stage, m]
        if stage < ranks - 1:
            rows["gradient"][tick, stage] = rows["gradient_arrives"][order.backward[stage + 1, m], stage] = schedule.gradient_slot[stage, m]
        if stage == 0 and m % ranks == ranks - 1:
            returns[tick] = m // ranks
    return rows | {"group": group, "returns": returns}


def _phase(rows: dict[str, np.ndarray], tick: int) -> tuple[bool, bool]:
    return bool((rows["forward"][tick] >= 0).any()), bool((rows["backward"][tick] >= 0).any())


def _last_group(returned, returning, microbatches: int, ranks: int, axis: str):
    """A last group that is not full has not turned all the way; rank r has microbatch r of it after the rest of the way."""
    if (count := microbatches % ranks) == 0:
        return returned
    return returned.at[-1].set(_turn(returning, ranks, axis, steps=ranks - count))


def _prologue_backward(parts: Parts, weights, returned, microbatches: int, ranks: int, me) -> Tree:
    def add(sums, group):
        index, dx = group
        m = index * ranks + me
        _, vjp = jax.vjp(lambda w: parts.prologue(w, jnp.minimum(m, microbatches - 1)), weights)
        (dw,) = vjp(jnp.where(m < microbatches, dx, jnp.zeros((), dx.dtype)))
        return _added(sums, dw), None

    with jax.named_scope("prologue_backward"):
        sums, _ = lax.scan(add, _zeros(weights, jnp.float32), (jnp.arange(len(returned), dtype=jnp.int32), returned))
    return sums


def _turn(x, ranks: int, axis: str, *, steps: int = 1, towards_last: bool = False):
    """What each rank holds, moved that many ranks on: towards rank 0 (and from it to the last), or the other way."""
    shift = steps if towards_last else -steps
    return lax.ppermute(x, axis, [(rank, (rank + shift) % ranks) for rank in range(ranks)])


def _share(y, ranks: int) -> tuple[int, int]:
    """Tokens of a microbatch, and of one rank's part of them."""
    tokens = y.shape[0] * y.shape[1]
    return tokens, -(-tokens // ranks)


def _head_arguments(first, ranks: int):
    _, share = _share(first[0], ranks)
    part = jax.ShapeDtypeStruct((share, first.shape[-1]), first.dtype)
    return part, jnp.int32(0), jnp.int32(0), jnp.bool_(True)


def _zeros(tree: Tree, dtype=None) -> Tree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, dtype or a.dtype), tree)


def _added(sums: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, new)
