"""What a checkpoint holds of a state: everything but the parameters, with MoE blocks in the order of the model on any mesh.

On devices a pipeline may hold blocks in another order, with gaps (`moejax.parallel.pipeline.split`). They are moved when a state is saved
or read; where the order is the model's own, as without a pipeline and with one stage on each rank, nothing is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from moejax.config import TrainConfig
from moejax.optim import path_name
from moejax.parallel.pipeline import split_of
from moejax.parallel.pipeline.split import Split
from moejax.parallel.rules import make_rule
from moejax.train.state import TrainState, abstract_state, make_layout, make_parameters

Tree = Any

_PARTS = ("master", "moments", "router", "history", "step", "updates")


def durable(config: TrainConfig, mesh: Mesh, state: TrainState) -> dict:
    """What is saved of a state."""
    tree, split = _parts_of(state), split_of(config)
    if split.is_natural:
        return tree
    shardings = jax.tree.map(lambda a: a.sharding, abstract_durable(config, mesh))
    return jax.jit(lambda tree: in_block_order(tree, split), out_shardings=shardings)(tree)


def from_durable(config: TrainConfig, mesh: Mesh, saved: dict) -> TrainState:
    """The state that `durable` was taken from; parameters are made from the masters."""
    saved = placed(config, mesh, saved)
    return TrainState(params=make_parameters(config, mesh, saved["master"]), **saved)


def placed(config: TrainConfig, mesh: Mesh, saved: dict) -> dict:
    """Parts of what is saved, as the mesh holds them."""
    if (split := split_of(config)).is_natural:
        return saved
    wanted = _parts_of(abstract_state(config, mesh))
    shardings = jax.tree.map(lambda a: a.sharding, {name: wanted[name] for name in saved})
    return jax.jit(lambda tree: in_place_order(tree, split), out_shardings=shardings)(saved)


def abstract_durable(config: TrainConfig, mesh: Mesh) -> dict:
    """Shapes, dtypes and shardings of what is saved, nothing allocated."""
    tree, split = _parts_of(abstract_state(config, mesh)), split_of(config)
    if split.is_natural:
        return tree
    axes = {path_name(path): spec.logical_axes for path, spec in jax.tree_util.tree_leaves_with_path(make_layout(config, mesh).specs)}
    sizes = dict(mesh.shape)

    def leaf(path: tuple, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not _is_of_blocks(path):
            return a
        shape, name = (len(split.places), *a.shape[1:]), path_name(path)
        names = next((names for key, names in axes.items() if name.endswith(key)), ("stage", *[""] * (len(shape) - 1)))
        if shape[0] % config.mesh.pp:  # blocks that ranks cannot share evenly are split by another dim
            names = tuple("layer" if name == "stage" else name for name in names)
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=NamedSharding(mesh, make_rule(shape, names, sizes).state))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def in_block_order(tree: Tree, split: Split) -> Tree:
    """Arrays of MoE blocks, [places, ...], as [blocks, ...]."""
    return _of_blocks(tree, lambda a: a[split.places])


def in_place_order(tree: Tree, split: Split) -> Tree:
    """The other way; zero in places that are empty."""

    def move(a):
        is_filled = (split.order >= 0).reshape(-1, *[1] * (a.ndim - 1))
        return jnp.where(is_filled, a[np.maximum(split.order, 0)], jnp.zeros((), a.dtype))

    return _of_blocks(tree, move)


def _parts_of(state: TrainState) -> dict:
    return {name: getattr(state, name) for name in _PARTS}


def _of_blocks(tree: Tree, move: Callable[[jax.Array], jax.Array]) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, a: move(a) if _is_of_blocks(path) else a, tree)


def _is_of_blocks(path: tuple) -> bool:
    """Whether an array of a state has a row for each MoE block: their parameters, and the bias of their routers."""
    names = path_name(path).split(".")
    return "moe_blocks" in names or names[-1] == "bias"
