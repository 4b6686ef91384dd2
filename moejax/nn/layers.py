"""The layers of a stack one after the other, forward and backward, in loops that read weights from the stack at an index.

    forward     x, kept            <- weights[place], x             from the first layer to the last
    backward    dx, sums[place]    <- weights[place], kept, dx      from the last to the first; the layer's gradient is added to the sums

A layer's gradient is added as soon as it is there, so gradients of a whole stack never exist beside their sums; a stack of weights is
never sliced or copied. What is kept of a layer are the residuals of `jax.vjp`, less all that the backward pass has at hand again: weights,
the layer's numbers, and what the layers share. As residuals are those of `jax.checkpoint`, any rule of recomputation can be followed.

Windows that the compiler has to know cut a stack into segments (`moejax.nn.segments`), each a loop of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moejax.nn.segments import Segment, split
from moejax.parallel.scopes import GRADIENT_SUMS, KEPT

Tree = Any

Block = Callable[[Tree, Array, Tree, Tree], tuple[tuple[Array, Array], Tree]]
"""(weights, x, numbers of the layer, what layers share) -> ((x, float32 scalar to add to the loss), what the layer reports)."""


class Layers(NamedTuple):
    """Layers to run, in order.

    name: of the stack. make_block: (window, repeats of the loop around it) -> block. stack: weights, [N, ...] each.
    places: of the layers in the stack. numbers: tree [L, ...] of what differs between layers beside weights.
    shared: tree of what does not, made again for the backward pass. windows: of each layer, as far as the compiler knows them.
    """

    name: str
    make_block: Callable[[int | None, int], Block]
    stack: Tree
    places: Int[Array, " L"]
    numbers: Tree
    shared: Tree
    windows: tuple[int | None, ...]

    def loops(self) -> Iterator[tuple[list[Block], tuple[Tree, Tree]]]:
        """For each segment the blocks of its period, and what to scan: (places, numbers) [repeats, period, ...]."""
        first = 0
        for segment in split(self.windows):
            blocks = [self.make_block(window, segment.repeats) for window in segment.period]
            yield blocks, jax.tree.map(lambda a, at=first, s=segment: _folded(a, at, s), (self.places, self.numbers))
            first += segment.num_layers

    def weights(self, place: Int[Array, ""]) -> Tree:
        return jax.tree.map(lambda a: _at(a, place), self.stack)


@dataclass(frozen=True)
class _Static:
    """A value that is no part of a tree's structure, so that trees from two traces of one function are alike."""

    value: Any = field(compare=False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """What layers leave for their backward pass.

    arrays: for each segment and block of its period, arrays [repeats, ...]. forms: the VJP that they belong to, and where its other leaves
    come from.
    """

    arrays: list[list[list[Array]]]
    forms: _Static = field(metadata={"static": True})


def forward(layers: Layers, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Tree]:
    """x behind all layers, and what each reported, [L, ...]."""
    reports = []
    for blocks, scanned in layers.loops():

        def run(x, scanned, blocks=blocks):
            found = []
            for i, block in enumerate(blocks):
                place, numbers = _row(scanned, i)
                (x, _), report = block(layers.weights(place), x, numbers, layers.shared)
                found.append(report)
            return x, _stacked(found)

        with jax.named_scope(layers.name):
            x, report = lax.scan(run, x, scanned)
        reports.append(report)
    return x, _in_order(reports)


def keep(
    layers: Layers, x: Float[Array, "B T D"], slots: tuple[Kept, Int[Array, ""]] | None = None
) -> tuple[Float[Array, "B T D"], Tree, Kept]:
    """The same, and what `backward` needs.

    Args:
        slots: arrays with one more leading dim, and the index at which to put it in them.
    """
    reports, arrays, forms = [], [], []
    for number, (blocks, scanned) in enumerate(layers.loops()):
        seen: list = [None] * len(blocks)
        into = None if slots is None else slots[0].arrays[number]

        def run(carry, scanned, blocks=blocks, seen=seen):
            (x, into), (turn, rows), found, kept = carry, scanned, [], []
            for i, block in enumerate(blocks):
                place, numbers = _row(rows, i)
                weights = layers.weights(place)
                (x, _), vjp, report = jax.vjp(lambda w, x, b=block, n=numbers: b(w, x, n, layers.shared), weights, x, has_aux=True)
                leaves, seen[i] = _without(vjp, (weights, numbers, layers.shared))
                found.append(report)
                kept.append(leaves)
            if slots is None:
                return (x, None), (_stacked(found), kept)
            with jax.named_scope(KEPT):
                return (x, jax.tree.map(lambda a, leaf: _put(a, leaf, slots[1], turn), into, kept)), (_stacked(found), None)

        turns = jnp.arange(scanned[0].shape[0], dtype=jnp.int32)
        with jax.named_scope(layers.name):
            (x, into), (report, kept) = lax.scan(run, (x, into), (turns, scanned))
        reports.append(report)
        arrays.append(kept if slots is None else into)
        forms.append(seen)
    return x, _in_order(reports), Kept(arrays, _Static(forms))


def backward(
    layers: Layers,
    kept: Kept,
    dy: Float[Array, "B T D"],
    sums: Tree,
    *,
    is_real: Bool[Array, ""] | None = None,
    slot: Int[Array, ""] | None = None,
    is_only: bool = False,
) -> tuple[Float[Array, "B T D"], Tree]:
    """Gradient of the layers' input, and `sums`, float32 like the stack, with the gradients of weights added.

    The loss is that of dy plus the scalars of all layers.

    Args:
        kept: what `keep` returned; with `slot`, arrays that have one more leading dim, of which it is the index.
        is_real: False: the gradients of weights are not added. None is True.
        is_only: sums hold zeros, and gradients take their place: with one microbatch there is nothing to add to.
    """
    dx, scalar = dy, jnp.float32(1) if is_real is None else is_real.astype(jnp.float32)
    for (blocks, scanned), arrays, forms in reversed(list(zip(layers.loops(), kept.arrays, kept.forms.value, strict=True))):
        repeats = scanned[0].shape[0]

        def run(carry, scanned, blocks=blocks, arrays=arrays, forms=forms):
            (dx, sums), (turn, rows) = carry, scanned
            for i in reversed(range(len(blocks))):
                place, numbers = _row(rows, i)
                leaves = [_at(a, turn) if slot is None else _at(a, slot, turn) for a in arrays[i]]
                vjp = _with(forms[i], leaves, (layers.weights(place), numbers, layers.shared))
                dw, dx = vjp((dx, scalar))
                # Sums are a pass of their own: XLA would fuse them into what makes dx, and then copy the row of the sums twice.
                place, dw, dx = lax.optimization_barrier((place, dw, dx))
                with jax.named_scope(GRADIENT_SUMS):
                    sums = jax.tree.map(lambda total, part, p=place: _added(total, p, part, is_real, is_only), sums, dw)
            return (dx, sums), None

        turns = jnp.arange(repeats, dtype=jnp.int32)
        with jax.named_scope(layers.name):
            (dx, sums), _ = lax.scan(run, (dx, sums), (turns, scanned), reverse=True)
    return dx, sums


def _without(vjp: Callable, known: Tree) -> tuple[list[Array], tuple]:
    """The leaves of a VJP that are not among those of `known`, and how to put it together again."""
    leaves, structure = jax.tree.flatten(vjp)
    where = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
    sources = [where.get(id(leaf)) for leaf in leaves]
    return [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None], (structure, sources)


def _with(form: tuple, kept: list[Array], known: Tree) -> Callable:
    (structure, sources), rest, known = form, iter(kept), jax.tree.leaves(known)
    return jax.tree.unflatten(structure, [next(rest) if source is None else known[source] for source in sources])


def _added(total: Array, place: Array, part: Array, is_real: Array | None, is_only: bool) -> Array:
    part = part.astype(total.dtype)
    if is_real is not None:
        part = jnp.where(is_real, part, 0)
    return _put(total, part if is_only else _at(total, place) + part, place)


def _at(a: Array, *index: Array) -> Array:
    """a[index]; no index is negative."""
    inner, starts = a.shape[len(index) :], [*index, *[0] * (a.ndim - len(index))]
    return lax.dynamic_slice(a, starts, (1,) * len(index) + inner, allow_negative_indices=False).reshape(inner)


def _put(a: Array, value: Array, *index: Array) -> Array:
    """a with a[index] = value."""
    starts = [*index, *[0] * value.ndim]
    return lax.dynamic_update_slice(a, value.reshape((1,) * len(index) + value.shape), starts, allow_negative_indices=False)


def _folded(a: Array, first: int, segment: Segment) -> Array:
    return a[first : first + segment.num_layers].reshape(segment.repeats, len(segment.period), *a.shape[1:])


def _row(tree: Tree, i: int) -> Tree:
    return jax.tree.map(lambda a: a[i], tree)


def _stacked(reports: list[Tree]) -> Tree:
    return jax.tree.map(lambda *parts: jnp.stack(parts), *reports)


def _in_order(reports: list[Tree]) -> Tree:
    """Reports [repeats, period, ...] of each segment as [L, ...]."""
    flat = [jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), report) for report in reports]
    return flat[0] if len(flat) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *flat)
