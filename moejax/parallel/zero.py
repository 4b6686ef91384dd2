"""The sharded update: reduce gradients, measure them, and bring back parameters. Runs inside shard_map, on local arrays.

The optimizer itself is handed in by the caller; every reduction that it would need lives here.
"""

from collections import defaultdict

import jax
import jax.numpy as jnp
from jax import lax

from moejax.parallel.rules import Rule

Tree = dict


def reduce_gradients(grads: Tree, rules: Tree) -> Tree:
    """Sum float32 gradients over the axes that each parameter is replicated over, and keep this device's shard.

    Leaves with sharded state are reduce-scattered; the others are summed in one all-reduce of their concatenation. Gradients of
    parameters that are themselves kept as shards (fsdp) arrive reduced.
    """
    leaves, structure = jax.tree.flatten(grads)
    layout = structure.flatten_up_to(rules)
    together = defaultdict(list)
    for i, (grad, rule) in enumerate(zip(leaves, layout, strict=True)):
        if rule.is_gathered:
            continue
        if rule.dim is not None:
            leaves[i] = lax.psum_scatter(grad, rule.axes, scatter_dimension=rule.dim, tiled=True)
        elif rule.axes:
            together[rule.axes].append(i)
    for axes, members in together.items():
        flat = lax.psum(jnp.concatenate([leaves[i].reshape(-1) for i in members]), axes)
        start = 0
        for i in members:
            size = leaves[i].size
            leaves[i] = flat[start : start + size].reshape(leaves[i].shape)
            start += size
    return structure.unflatten(leaves)


def global_norm(grads: Tree, rules: Tree, mesh_axes: tuple[str, ...]) -> jax.Array:
    """L2 norm of reduced gradients over all devices, each parameter counted once."""
    leaves, structure = jax.tree.flatten(grads)
    layout: list[Rule] = structure.flatten_up_to(rules)
    mine = [jnp.sum(jnp.square(grad)) / rule.copies for grad, rule in zip(leaves, layout, strict=True)]
    return jnp.sqrt(lax.psum(sum(mine), mesh_axes))


def clip_scale(norm: jax.Array, max_norm: float | None) -> jax.Array:
    """Factor that brings the gradient norm down to max_norm; 1 below it."""
    return jnp.float32(1.0) if max_norm is None else jnp.minimum(1.0, max_norm / (norm + 1e-6))


def gather_parameters(master: Tree, rules: Tree, dtypes: Tree) -> Tree:
    """Compute-dtype parameters from float32 masters: cast, then all-gather what is sharded and not to be kept so."""
    leaves, structure = jax.tree.flatten(master)
    layout, types = structure.flatten_up_to(rules), structure.flatten_up_to(dtypes)

    def whole(value, rule, dtype):
        value = value.astype(dtype)
        return value if rule.dim is None or rule.is_gathered else lax.all_gather(value, rule.axes, axis=rule.dim, tiled=True)

    return structure.unflatten([whole(*triple) for triple in zip(leaves, layout, types, strict=True)])
