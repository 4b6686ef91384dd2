"""Memory and traffic of the training step by arithmetic, from the config alone; bytes of one GPU.

With pipeline stages (mesh.pp > 1) a rank holds its part of the MoE blocks, the same number on every rank, and all of embedding, dense
blocks and head.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax

from moejax.config import ModelConfig, TrainConfig
from moejax.nn import ParamSpec, Transformer, is_spec
from moejax.optim import empty_history, path_name
from moejax.parallel.expert import receive_rows
from moejax.parallel.mesh import mesh_shape
from moejax.parallel.rules import Rule, make_rule

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_HLO = {"float32": "f32", "bfloat16": "bf16"}


def argument_bytes(config: TrainConfig) -> dict[str, int]:
    """What the step is given: parameters, optimizer (float32 master and two moments), router, counters, batch.

    The step gives back all but the batch, in the same memory.
    """
    parameters = sum(count * ITEM_BYTES[dtype] for _, count, dtype in local_parameters(config))
    optimizer = sum(3 * 4 * _local(spec.shape, rule.state, config) for _, spec, rule in placed(config))
    moe = config.model.moe
    history = jax.tree.leaves(jax.eval_shape(lambda: empty_history(config.optim)))
    counters = 2 * 4 + sum(leaf.size * leaf.dtype.itemsize for leaf in history)
    return {
        "parameters": parameters,
        "optimizer": optimizer,
        "router": 0 if moe is None else 4 * rank_layers(config) * moe.num_experts,
        "counters": counters,
        "batch": 4 * 4 * tokens(config) * config.microbatches,
    }


class Traffic(NamedTuple):
    """Collectives of one kind over the same axes in one step.

    dtype: as HLO prints it. payload: bytes of the whole arrays. times: how many start if XLA merges none.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    payload: int
    times: int


def step_traffic(config: TrainConfig) -> list[Traffic]:
    """Everything above 1 MiB that a step sends with the transport ragged, and the counts of routes.

    Rows: each move carries T * A rows of D, whatever the capacity. Weights: one reduce-scatter and one all-gather of each leaf after
    the last microbatch; or with fsdp in each microbatch one reduce-scatter and two all-gathers (one for embedding and head).
    Stages: in each tick all ranks hand on activations or gradients, and turn the rings of the prologue; in each backward tick the head's
    input is split over pp and its gradient gathered.
    """
    found: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    times: Counter[tuple[str, tuple[str, ...], str]] = Counter()
    together: Counter[tuple[str, ...]] = Counter()

    def add(kind: str, axes: tuple[str, ...], dtype: str, payload: int, runs: int) -> None:
        found[kind, axes, dtype] += payload * runs
        times[kind, axes, dtype] += runs

    for _, spec, rule in placed(config):
        if rule.dim is None:
            together[rule.axes] += 4 * _local(spec.shape, rule.param, config)
        else:
            dtype, size = spec.dtype or config.model.dtype, math.prod(spec.shape)
            whole = size // _ranks(config, [axis for axis in _named(rule.state) if axis not in rule.axes])
            is_stack = spec.logical_axes[0] in ("layer", "stage")
            layers = spec.shape[0] if is_stack else 1
            if not rule.is_gathered:
                add("reduce-scatter", rule.axes, "f32", 4 * whole, 1)
                add("all-gather", rule.axes, _HLO[dtype], ITEM_BYTES[dtype] * whole, 1)
                continue
            runs, part = layers * config.microbatches, ITEM_BYTES[dtype] * whole // layers
            add("reduce-scatter", rule.axes, _HLO[dtype], part, runs)
            add("all-gather", rule.axes, _HLO[dtype], part, runs * (2 if is_stack else 1))
    for axes, payload in together.items():
        if axes and payload >= 2**20:  # leaves that no dim of divides by the ranks; the small ones do not count
            add("all-reduce", axes, "f32", payload, 1)
    pipeline, layers = config.mesh.pp > 1, rank_layers(config) // config.mesh.virtual_stages
    passes = forward_ticks(config) if pipeline else config.microbatches
    if config.model.moe is not None and config.mesh.ep > 1:
        # Dispatch, combine, their backward passes, and what is computed again. A pipeline's ticks are idle or not, and run stages twice.
        again = () if config.model.recompute == "none" else {"expert_rows", "expert_out"} - set(config.model.kept_residuals)
        moves, gathers = (6, 2) if pipeline else (4, 1)
        add("all-gather", ("ep",), "s32", 4 * config.mesh.ep * config.model.moe.num_experts, layers * passes * gathers)
        add("ragged-all-to-all", ("ep",), _HLO[config.model.dtype], row_bytes(config), layers * passes * (moves + len(again)))
    if pipeline:
        dtype, x = config.model.dtype, tokens(config) * config.model.embed_dim * ITEM_BYTES[config.model.dtype]
        turns = 4 * passes + (config.microbatches % config.mesh.pp > 0)  # on to the next stage and back, and two rings of the prologue
        add("collective-permute", ("pp",), _HLO[dtype], x, turns)
        shared = x // tokens(config) * -(-tokens(config) // config.mesh.pp) * config.mesh.pp
        add("reduce-scatter", ("pp",), _HLO[dtype], shared, passes)
        add("all-gather", ("pp",), _HLO[dtype], shared, passes)
    return [Traffic(*key, payload, times[key]) for key, payload in found.items()]


def forward_ticks(config: TrainConfig) -> int:
    """Ticks of a pipeline in which a rank runs forward; as many hold a backward pass. (Interleaved) 1F1B and gpipe are alike in this."""
    mesh = config.mesh
    groups = -(-config.microbatches // mesh.pp) * mesh.pp if mesh.virtual_stages > 1 else config.microbatches
    return mesh.virtual_stages * groups + mesh.pp - 1


def rank_layers(config: TrainConfig) -> int:
    """MoE blocks of one pipeline rank; stages have equally many, the last ones filled up with empty blocks."""
    stages = config.mesh.pp * config.mesh.virtual_stages
    return -(-config.model.num_moe_layers // stages) * config.mesh.virtual_stages


def dispatch_buffer_bytes(config: TrainConfig, tile: int = 128) -> int:
    """Bytes of the buffer in which a rank receives the rows of its experts, in one MoE layer and microbatch."""
    moe, model = config.model.moe, config.model
    assert moe is not None
    rows = receive_rows(
        tokens=tokens(config),
        top_k=moe.top_k,
        num_experts=moe.num_experts,
        ranks=config.mesh.ep,
        capacity_factor=moe.capacity_factor,
        tile=tile,
    )
    return rows * model.embed_dim * ITEM_BYTES[model.dtype]


def row_bytes(config: TrainConfig) -> int:
    """Bytes of the routed rows of one rank in one MoE layer and microbatch: T * A * D * itemsize."""
    assert config.model.moe is not None
    return tokens(config) * config.model.moe.top_k * config.model.embed_dim * ITEM_BYTES[config.model.dtype]


def tokens(config: TrainConfig) -> int:
    """Tokens of one GPU in one microbatch."""
    return config.microbatch_size // config.mesh.data_ranks * config.data.seq_len


def local_parameters(config: TrainConfig) -> list[tuple[str, int, str]]:
    """(dotted name, elements on one GPU, compute dtype) of every parameter."""
    return [(name, _local(spec.shape, rule.param, config), spec.dtype or config.model.dtype) for name, spec, rule in placed(config)]


def placed(config: TrainConfig) -> Iterator[tuple[str, ParamSpec, Rule]]:
    """Every parameter: dotted name, declaration (of a MoE block: for those of one pipeline rank), and placement on the mesh."""
    shape, weights = mesh_shape(config.mesh), config.mesh.weights
    for name, spec in _parameters(dataclasses.replace(config.model, recompute="none", recompute_keep=())):
        is_staged = config.mesh.pp > 1 and name.startswith("moe_blocks")
        if is_staged:
            spec = dataclasses.replace(spec, shape=(rank_layers(config), *spec.shape[1:]))
        yield name, spec, make_rule(spec.shape, spec.logical_axes, shape | {"pp": 1} if is_staged else shape, weights=weights)


@functools.lru_cache(maxsize=8)
def _parameters(model: ModelConfig) -> list[tuple[str, ParamSpec]]:
    return [(path_name(path), spec) for path, spec in jax.tree_util.tree_leaves_with_path(Transformer(model).specs, is_leaf=is_spec)]


def _local(shape: tuple[int, ...], spec, config: TrainConfig) -> int:
    """Elements of a leaf on one device."""
    return math.prod(shape) // _ranks(config, _named(spec))


def _ranks(config: TrainConfig, axes: list[str]) -> int:
    return math.prod(mesh_shape(config.mesh)[axis] for axis in axes)


def _named(spec) -> list[str]:
    """Mesh axes that a PartitionSpec names."""
    return [axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
