"""What routing looked like in one step, from sums over devices and microbatches."""

import jax
import jax.numpy as jnp

from moejax.nn import MoEStats


def router_metrics(total: MoEStats, peak_demand: jax.Array, num_real: jax.Array, *, ranks: int) -> dict[str, jax.Array]:
    """Float32 metrics named moe/*.

    Args:
        total: sums over devices and microbatches, stacked over layers [L].
        peak_demand: [L], largest demand of any rank and microbatch.
        num_real: tokens that are not padding.
        ranks: size of the ep axis.
    """
    counts, routes = total.counts, jnp.maximum(total.traffic.routes, 1.0)
    by_rank = counts.reshape(counts.shape[0], ranks, -1).sum(axis=-1)
    layer_drop = total.traffic.dropped / routes
    return {
        "moe/balance_loss": total.balance_loss.mean() / num_real,
        "moe/router_z_loss": total.z_loss.mean() / num_real,
        "moe/drop_fraction": total.traffic.dropped.sum() / routes.sum(),
        "moe/buffer_demand": peak_demand.max(),
        "moe/max_load": _max_over_mean(counts).max(),
        "moe/rank_max_load": _max_over_mean(by_rank).max(),
        "moe/expert_load": counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1.0),
        "moe/layer_drop": layer_drop,
    }


def _max_over_mean(counts: jax.Array) -> jax.Array:
    """Largest entry over the mean entry, per row; 1 is an even load."""
    return counts.max(axis=-1) / jnp.maximum(counts.mean(axis=-1), 1e-9)
