"""Balance loss and router z-loss.

The balance loss of a group of tokens is (E / A) * sum_e count_e * mean_t(share_te) (Fedus et al. 2021, equation 4, times
the number of tokens of the group). Divided by the tokens of the batch and summed over its groups it is 1 when every group
is balanced. The group decides what "balanced" means: a rank's microbatch, one sequence, or all ranks' microbatch.

It mixes hard counts with soft shares, so a value below 1 is possible, and can come with an uneven load.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def count_routes(experts: Int[Array, "BT A"], valid: Bool[Array, " BT"], num_experts: int) -> Float[Array, " E"]:
    """Routes of valid tokens to each expert, before any capacity; exact in float32 up to 2^24 routes."""
    weights = jnp.broadcast_to(valid[:, None], experts.shape).astype(jnp.float32)
    return jnp.zeros((num_experts,), jnp.float32).at[experts.reshape(-1)].add(weights.reshape(-1))


def local_balance(shares: Float[Array, "BT E"], counts: Float[Array, " E"], valid: Bool[Array, " BT"], top_k: int) -> Float[Array, ""]:
    """The balance loss with this device's microbatch as the group, times its valid tokens."""
    mean_share = _masked_sum(shares, valid) / jnp.maximum(valid.sum(), 1)
    return shares.shape[1] / top_k * jnp.sum(lax.stop_gradient(counts) * mean_share)


def instance_balance(shares: Float[Array, "B T E"], experts: Int[Array, "B T A"], valid: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The balance loss with each sequence as a group, times its valid tokens, summed over sequences."""
    num_experts, top_k = shares.shape[2], experts.shape[2]
    counts = jax.vmap(lambda e, ok: count_routes(e, ok, num_experts))(experts, valid)
    mean_share = jax.vmap(_masked_sum)(shares, valid) / jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    return num_experts / top_k * jnp.sum(lax.stop_gradient(counts) * mean_share)


def global_balance(
    shares: Float[Array, "BT E"],
    group_counts: Float[Array, " E"],
    group_tokens: Float[Array, ""],
    valid: Bool[Array, " BT"],
    top_k: int,
) -> Float[Array, ""]:
    """This device's part of the balance loss with all devices' microbatch as the group; parts add up over devices.

    group_counts and group_tokens are sums over the devices and must not carry gradients.
    """
    share = _masked_sum(shares, valid) / jnp.maximum(group_tokens, 1.0)
    return shares.shape[1] / top_k * jnp.sum(lax.stop_gradient(group_counts) * share)


def router_z(logits: Float[Array, "BT E"], valid: Bool[Array, " BT"]) -> Float[Array, ""]:
    """Sum over valid tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5)."""
    return jnp.sum(jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0))


def _masked_sum(shares: Float[Array, "BT E"], valid: Bool[Array, " BT"]) -> Float[Array, " E"]:
    return jnp.sum(jnp.where(valid[:, None], shares, 0.0), axis=0)
