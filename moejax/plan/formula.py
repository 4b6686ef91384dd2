"""Memory of the training step by arithmetic, from the config alone; bytes of one GPU."""

import math
from collections.abc import Iterator

import jax

from moejax.config import TrainConfig
from moejax.nn import ParamSpec, Transformer, is_spec
from moejax.optim import empty_history
from moejax.parallel.mesh import mesh_shape
from moejax.parallel.rules import Rule, make_rule

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def argument_bytes(config: TrainConfig) -> dict[str, int]:
    """What the step is given: parameters, optimizer (float32 master and two moments), router, counters, batch.

    The step gives back all but the batch, in the same memory.
    """
    parameters = optimizer = 0
    for spec, rule in placed(config):
        parameters += _local(spec.shape, rule.param, config) * _ITEM_BYTES[spec.dtype or config.model.dtype]
        optimizer += 3 * 4 * _local(spec.shape, rule.state, config)
    moe, model = config.model.moe, config.model
    history = jax.tree.leaves(jax.eval_shape(lambda: empty_history(config.optim)))
    counters = 2 * 4 + sum(leaf.size * leaf.dtype.itemsize for leaf in history)
    rows = config.batch_size // config.mesh.num_devices
    return {
        "parameters": parameters,
        "optimizer": optimizer,
        "router": 0 if moe is None else 4 * model.num_moe_layers * moe.num_experts,
        "counters": counters,
        "batch": 4 * 4 * rows * config.data.seq_len,
    }


def placed(config: TrainConfig) -> Iterator[tuple[ParamSpec, Rule]]:
    """Every parameter's declaration with its placement on the config's mesh."""
    for spec in jax.tree.leaves(Transformer(config.model).specs, is_leaf=is_spec):
        yield spec, make_rule(spec.shape, spec.logical_axes, mesh_shape(config.mesh), weights=config.mesh.weights)


def _local(shape: tuple[int, ...], spec, config: TrainConfig) -> int:
    """Elements of a leaf on one device."""
    sizes = mesh_shape(config.mesh)
    named = [axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
    return math.prod(shape) // math.prod(sizes[axis] for axis in named)
