"""What the training step sends, by arithmetic, from the config alone."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from moejax.config import TrainConfig
from moejax.plan.formula import count_ranks, local_size, named_axes, placed, rank_layers
from moejax.plan.moves import HLO_NAME, ITEM_BYTES, forward_moves, tokens, training_moves
from moejax.plan.stages import stages_of


class Traffic(NamedTuple):
    """Collectives of one kind over the same axes in one step.

    dtype: as HLO prints it. payload: bytes of the whole arrays. times: how many start if XLA merges none.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    payload: int
    times: int


def step_traffic(config: TrainConfig, tile: int = 128) -> list[Traffic]:
    """Everything above 1 MiB that a step sends, and the counts of routes.

    Rows: as `moejax.plan.moves` says, in every MoE layer and microbatch; in a pipeline in every tick, for stages run that are idle.
    Weights: one reduce-scatter and one all-gather of each leaf after the last microbatch; or with fsdp in each microbatch one
    reduce-scatter and two all-gathers (one for embedding and head).

    Args:
        tile: rows of a tile of the grouped matmul.
    """
    payload: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    times: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    for line in (*_weights(config), *_rows(config, tile), *_between_stages(config)):
        payload[line[:3]] += line.payload * line.times
        times[line[:3]] += line.times
    return [Traffic(*key, size, times[key]) for key, size in payload.items()]


def _weights(config: TrainConfig) -> Iterator[Traffic]:
    """Gradients to the ranks that update, weights back."""
    together: Counter[tuple[str, ...]] = Counter()
    for _, spec, rule in placed(config):
        if rule.dim is None:
            together[rule.axes] += 4 * local_size(spec.shape, rule.param, config)
            continue
        dtype, size = spec.dtype or config.model.dtype, math.prod(spec.shape)
        whole = size // count_ranks(config, [axis for axis in named_axes(rule.state) if axis not in rule.axes])
        is_stack = spec.logical_axes[0] in ("layer", "stage")
        layers = spec.shape[0] if is_stack else 1
        if not rule.is_gathered:
            yield Traffic("reduce-scatter", rule.axes, "f32", 4 * whole, 1)
            yield Traffic("all-gather", rule.axes, HLO_NAME[dtype], ITEM_BYTES[dtype] * whole, 1)
            continue
        runs, part = layers * config.microbatches, ITEM_BYTES[dtype] * whole // layers
        yield Traffic("reduce-scatter", rule.axes, HLO_NAME[dtype], part, runs)
        yield Traffic("all-gather", rule.axes, HLO_NAME[dtype], part, runs * (2 if is_stack else 1))
    for axes, size in together.items():
        if axes and size >= 2**20:  # leaves that no dim of divides by the ranks; the small ones do not count
            yield Traffic("all-reduce", axes, "f32", size, 1)


def _rows(config: TrainConfig, tile: int) -> Iterator[Traffic]:
    """Routes to their experts and back."""
    if config.model.moe is None or config.mesh.ep == 1:
        return
    stages, layers = stages_of(config), rank_layers(config) // config.mesh.virtual_stages
    for move in training_moves(config, tile):
        yield Traffic(move.kind, ("ep",), move.dtype, move.payload, layers * (stages.backward_ticks if stages else config.microbatches))
    if stages and stages.forward_ticks != stages.backward_ticks:
        for move in forward_moves(config, tile):
            yield Traffic(move.kind, ("ep",), move.dtype, move.payload, layers * (stages.forward_ticks - stages.backward_ticks))


def _between_stages(config: TrainConfig) -> Iterator[Traffic]:
    """Activations and gradients handed on, rings of the prologue, and the head's input, split over pp, with its gradient."""
    if (stages := stages_of(config)) is None:
        return
    pp, dtype = config.mesh.pp, config.model.dtype
    row = config.model.embed_dim * ITEM_BYTES[dtype]
    ticks = stages.forward_ticks + stages.backward_ticks
    turns = (stages.neighbours + 1) * ticks + (config.microbatches % pp > 0)
    yield Traffic("collective-permute", ("pp",), HLO_NAME[dtype], tokens(config) * row, turns)
    shared = -(-tokens(config) // pp) * pp * row
    yield Traffic("reduce-scatter", ("pp",), HLO_NAME[dtype], shared, config.microbatches)
    yield Traffic("all-gather", ("pp",), HLO_NAME[dtype], shared, config.microbatches)
