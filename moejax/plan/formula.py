"""What the training step is given, and where each parameter lies, by arithmetic from the config alone; bytes of one GPU.

With pipeline stages (mesh.pp > 1) a rank holds its part of the MoE blocks, the same number on every rank, and all of embedding, dense
blocks and head.
"""

import dataclasses
import functools
import math

import jax

from moejax.config import MeshConfig, ModelConfig, OptimConfig, TrainConfig
from moejax.nn import ParamSpec, Transformer, is_spec
from moejax.optim import empty_history, path_name
from moejax.parallel import rules
from moejax.parallel.mesh import mesh_shape
from moejax.parallel.rules import Rule
from moejax.plan.moves import ITEM_BYTES, tokens


def argument_bytes(config: TrainConfig) -> dict[str, int]:
    """What the step is given: parameters, optimizer (float32 master and two moments), router, counters, batch.

    The step gives back all but the batch, in the same memory.
    """
    parameters = sum(count * ITEM_BYTES[dtype] for _, count, dtype in local_parameters(config))
    optimizer = sum(3 * 4 * local_size(spec.shape, rule.state, config) for _, spec, rule in placed(config))
    moe = config.model.moe
    counters = 2 * 4 + _history_bytes(config.optim)
    return {
        "parameters": parameters,
        "optimizer": optimizer,
        "router": 0 if moe is None else 4 * rank_layers(config) * moe.num_experts,
        "counters": counters,
        "batch": 4 * 4 * tokens(config) * config.microbatches,
    }


def rank_layers(config: TrainConfig) -> int:
    """MoE blocks of one pipeline rank; stages have equally many, the last ones filled up with empty blocks."""
    stages = config.mesh.pp * config.mesh.virtual_stages
    return -(-config.model.num_moe_layers // stages) * config.mesh.virtual_stages


def local_parameters(config: TrainConfig) -> list[tuple[str, int, str]]:
    """(dotted name, elements on one GPU, compute dtype) of every parameter."""
    return [(name, local_size(spec.shape, rule.param, config), spec.dtype or config.model.dtype) for name, spec, rule in placed(config)]


def placed(config: TrainConfig) -> list[tuple[str, ParamSpec, Rule]]:
    """Every parameter: dotted name, declaration (of a MoE block: for those of one pipeline rank), and placement on the mesh."""
    model = dataclasses.replace(config.model, recompute="none", recompute_keep=())
    return _placed(model, config.mesh, rank_layers(config), rules.small_bytes())


@functools.lru_cache(maxsize=512)
def _placed(model: ModelConfig, mesh: MeshConfig, layers: int, small_bytes: int) -> list[tuple[str, ParamSpec, Rule]]:
    """small_bytes: what leaves are compared with (`moejax.parallel.rules`); what is remembered depends on it."""
    found, shape = [], mesh_shape(mesh)
    for name, spec in _parameters(model):
        is_staged = mesh.pp > 1 and name.startswith("moe_blocks")
        if is_staged:
            spec = dataclasses.replace(spec, shape=(layers, *spec.shape[1:]))
        rule = rules.make_rule(spec.shape, spec.logical_axes, shape | {"pp": 1} if is_staged else shape, weights=mesh.weights)
        found.append((name, spec, rule))
    return found


@functools.lru_cache(maxsize=8)
def _history_bytes(optim: OptimConfig) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(lambda: empty_history(optim))))


@functools.lru_cache(maxsize=8)
def _parameters(model: ModelConfig) -> list[tuple[str, ParamSpec]]:
    return [(path_name(path), spec) for path, spec in jax.tree_util.tree_leaves_with_path(Transformer(model).specs, is_leaf=is_spec)]


def local_size(shape: tuple[int, ...], spec, config: TrainConfig) -> int:
    """Elements of a leaf on one device."""
    return math.prod(shape) // count_ranks(config, named_axes(spec))


def count_ranks(config: TrainConfig, axes: list[str]) -> int:
    return math.prod(mesh_shape(config.mesh)[axis] for axis in axes)


def named_axes(spec) -> list[str]:
    """Mesh axes that a PartitionSpec names."""
    return [axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
