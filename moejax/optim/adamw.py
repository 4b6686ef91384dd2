"""AdamW on shards of float32 masters. Element-wise, so it works on any shard; optax does the moments."""

import jax
import jax.numpy as jnp
import optax

from moejax.config import OptimConfig


def init_moments(master: dict) -> dict:
    """Zero first and second moments, {"mu": tree, "nu": tree}."""
    return {"mu": jax.tree.map(jnp.zeros_like, master), "nu": jax.tree.map(jnp.zeros_like, master)}


def adamw(
    config: OptimConfig, groups: dict, grads: dict, master: dict, moments: dict, *, lr: jax.Array, updates: jax.Array
) -> tuple[dict, dict]:
    """New masters and moments (Loshchilov & Hutter 2019), all float32.

    Args:
        groups: a Group for each parameter.
        lr: learning rate of this step, before each group's factor.
        updates: int32, updates applied before this one; the bias corrections use updates + 1.
    """
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    direction, new = adam.update(grads, optax.ScaleByAdamState(updates, moments["mu"], moments["nu"]))
    assert isinstance(new, optax.ScaleByAdamState)
    leaves, structure = jax.tree.flatten(master)

    def step(value, toward, group):
        rate = lr * group.lr_scale
        return value - rate * (toward + group.weight_decay * value)

    triples = zip(leaves, structure.flatten_up_to(direction), structure.flatten_up_to(groups), strict=True)
    return structure.unflatten([step(*triple) for triple in triples]), {"mu": new.mu, "nu": new.nu}
