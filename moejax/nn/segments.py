"""Layers whose windows are known to the compiler, in few loops: a stack is cut where its pattern of windows breaks.

    windows   F w w F w w w F w w w F        F: full attention
    segments  F|w w|F|w w w F x 2            a loop each, its period unrolled: 1 + 1 + 1 + 4 compiled blocks for 12 layers

Each segment reads its layers from the whole stack, at an index. A slice of the weights would be a copy of them that stays until the
backward pass; and the gradient of reading by index would be as large as the stack, once a layer. So weights are read without a gradient,
which leaves the loop through a slot of its own, one a layer, as the gradient of scanned weights does.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import Partial
from jaxtyping import Array, Float

from moejax.parallel.fsdp import GATHERED


class Segment(NamedTuple):
    """Consecutive layers: the windows of one period, and how often it runs."""

    period: tuple[int, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.period) * self.repeats


def split(windows: tuple[int, ...]) -> tuple[Segment, ...]:
    """The segments with the fewest compiled blocks in all; of those, the fewest segments."""
    best: list[tuple[int, tuple[Segment, ...]]] = [(0, ())]
    for end in range(1, len(windows) + 1):
        options = []
        for start in range(end):
            period = _period(windows[start:end])
            options.append((best[start][0] + len(period), (*best[start][1], Segment(period, (end - start) // len(period)))))
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]


def _period(windows: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest tuple that gives the windows when repeated."""
    lengths = (n for n in range(1, len(windows) + 1) if len(windows) % n == 0)
    return windows[: next(n for n in lengths if windows[:n] * (len(windows) // n) == windows)]


def scan_segments(
    make_block: Callable[[int, int], Callable], x: Float[Array, "B T D"], stack: Any, layers: Any, windows: tuple[int, ...]
) -> tuple[Float[Array, "B T D"], Any]:
    """`lax.scan(block, x, (stack, layers))` over layers whose windows differ and are known.

    Args:
        make_block: (window, repeats of the loop around it) -> (x, read, layer) -> (x, out), where read() gives the layer's weights, under
            a checkpoint name of weights that are read again in the backward pass.
        stack, layers: trees of arrays [L, ...]; gradients reach the stack alone.
        windows: of each layer.
    """
    segments = split(windows)
    if len(set(windows)) == 1:
        block = make_block(windows[0], len(windows))
        return lax.scan(lambda x, layer: block(x, Partial(lambda arrays: arrays, layer[0]), layer[1]), x, (stack, layers))
    frozen, places, outs, first = lax.stop_gradient(stack), jnp.arange(len(windows), dtype=jnp.int32), [], 0
    for segment, slots in zip(segments, _slots(segments, stack), strict=True):
        rows, shape = slice(first, first + segment.num_layers), (segment.repeats, len(segment.period))
        parts = jax.tree.map(lambda a, rows=rows, shape=shape: a[rows].reshape(*shape, *a.shape[1:]), (places, layers))
        blocks = [make_block(window, segment.repeats) for window in segment.period]

        def run(x, scanned, blocks=blocks):
            found, (parts, slots) = [], scanned
            for i, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
                place, layer = jax.tree.map(lambda a, i=i: a[i], parts)
                x, out = block(x, Partial(_read, frozen, place, slot), layer)
                found.append(out)
            return x, jax.tree.map(lambda *parts: jnp.stack(parts), *found)

        x, out = lax.scan(run, x, (parts, slots))
        outs.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out))
        first += segment.num_layers
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)


def _read(stack, place, slot):
    return jax.tree.map(lambda a: checkpoint_name(a, GATHERED), _indexed(stack, place, slot))


@jax.custom_jvp
def _indexed(stack, place, slot):
    """The layer's weights; their tangent is the slot's."""
    del slot
    return _layer(stack, place)


_indexed.defjvp(lambda arrays, tangents: (_layer(*arrays[:2]), tangents[2]))


def _layer(stack, place):
    return jax.tree.map(lambda a: a[place], stack)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _slots(segments, stack):
    """For each segment and place in its period, a tree like the stack of those layers. Gradients come back through it; nothing reads it."""
    return tuple(
        tuple(jax.tree.map(lambda a, n=segment.repeats: jnp.zeros((n, *a.shape[1:]), a.dtype), stack) for _ in segment.period)
        for segment in segments
    )


def _gradients_in_layer_order(segments, _, gradients):
    def joined(*leaves):
        leaves, parts = iter(leaves), []
        for segment in segments:
            part = jnp.stack([next(leaves) for _ in segment.period], axis=1)
            parts.append(part.reshape(-1, *part.shape[2:]))
        return jnp.concatenate(parts)

    return (jax.tree.map(joined, *(places for segment in gradients for places in segment)),)


_slots.defvjp(lambda segments, stack: (_slots(segments, stack), None), _gradients_in_layer_order)
