"""AdamW on shards of float32 masters. Element-wise, so it works on any shard."""

import jax
import jax.numpy as jnp
from jax import lax

from moejax.config import OptimConfig
from moejax_kernels.device import platform


def init_moments(master: dict) -> dict:
    """Zero first and second moments, {"mu": tree, "nu": tree}."""
    return {"mu": jax.tree.map(jnp.zeros_like, master), "nu": jax.tree.map(jnp.zeros_like, master)}


def adamw(
    config: OptimConfig,
    groups: dict,
    grads: dict,
    master: dict,
    moments: dict,
    *,
    lr: jax.Array,
    updates: jax.Array,
    is_applied: jax.Array,
) -> tuple[dict, dict]:
    """New masters and moments (Loshchilov & Hutter 2019), all float32.

    Args:
        groups: a Group for each parameter.
        lr: learning rate of this step, before each group's factor.
        updates: int32, updates applied before this one; the bias corrections use updates + 1.
        is_applied: False leaves everything as it is, whatever the gradients hold.
    """
    leaves, structure = jax.tree.flatten(master)
    of_group, gradients, mu, nu = (structure.flatten_up_to(tree) for tree in (groups, grads, moments["mu"], moments["nu"]))

    def kept(new, old):
        return jnp.where(is_applied, new, old)

    mu = [kept(config.b1 * m + (1 - config.b1) * g, m) for m, g in zip(mu, gradients, strict=True)]
    nu = [kept(config.b2 * v + (1 - config.b2) * jnp.square(g), v) for v, g in zip(nu, gradients, strict=True)]
    if platform() == "cpu":
        # XLA has no kernel of several results there: it would work out the moments once more for the masters, from copies of the old ones.
        mu, nu = lax.optimization_barrier((mu, nu))
    mu_scale, nu_scale = (1 / (1 - decay ** (updates + 1)) for decay in (config.b1, config.b2))

    def step(value, m, v, group):
        toward = m * mu_scale / (jnp.sqrt(v * nu_scale) + config.eps)
        return kept(value - lr * group.lr_scale * (toward + group.weight_decay * value), value)

    leaves = [step(*each) for each in zip(leaves, mu, nu, of_group, strict=True)]
    return structure.unflatten(leaves), {"mu": structure.unflatten(mu), "nu": structure.unflatten(nu)}
