"""From router logits to experts and weights. Everything is float32."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.ops.hashing import uniform

ROUTING = "routing"
"""Name of chosen experts and of the plan made from them, for recomputation: kept in every mode."""

_SMALLEST_NORM = 1e-20  # of a token's weights; a bias can choose experts whose softmax score underflows to zero
_SIGMOID_FLOOR = 1e-7  # keeps the p-norm of sigmoid scores away from zero


class Routes(NamedTuple):
    """Where each token goes.

    experts: int32 [BT, A], distinct within a token, in falling order of selection score.
    weights: float32 [BT, A], of the experts' outputs.
    shares: float32 [BT, E], soft scores that sum to 1 over the experts; what balance losses see.
    """

    experts: Int[Array, "BT A"]
    weights: Float[Array, "BT A"]
    shares: Float[Array, "BT E"]


def score(logits: Float[Array, "*batch E"], gating: str) -> Float[Array, "*batch E"]:
    """Scores in (0, 1): softmax, or sigmoid + 1e-7. topk_softmax scores as softmax; its weights differ, see `route`."""
    if gating == "sigmoid":
        return jax.nn.sigmoid(logits) + _SIGMOID_FLOOR
    return jax.nn.softmax(logits, axis=-1)


def route(
    logits: Float[Array, "BT E"],
    bias: Float[Array, " E"] | None,
    *,
    top_k: int,
    gating: Literal["softmax", "sigmoid", "topk_softmax"],
    fixed_experts: Int[Array, "BT A"] | None = None,
    replaced_scores: Float[Array, "BT E"] | None = None,
) -> Routes:
    """Choose top_k experts a token by score plus bias; weigh them by the score alone (DeepSeek-V3, section 2.1.2).

    Ties go to the lower expert index. topk_softmax chooses by logit and takes the softmax over the chosen logits.

    Args:
        fixed_experts: use these experts, weighted by their scores (uniform assignment).
        replaced_scores: use these instead of the scores; the router then has zero gradient (random assignment).
    """
    scores = score(logits, gating)
    if replaced_scores is not None:
        scores = replaced_scores + 0.0 * scores
    ranked = logits if gating == "topk_softmax" else scores
    if fixed_experts is None:
        selection = lax.stop_gradient(ranked)
        if bias is not None:
            selection = selection + bias[None, :]
        experts = lax.top_k(selection, top_k)[1].astype(jnp.int32)
    else:
        experts = fixed_experts
    experts = checkpoint_name(experts, ROUTING)
    weights = jnp.take_along_axis(ranked, experts, axis=1)
    if gating == "topk_softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    return Routes(experts, weights, scores / scores.sum(axis=-1, keepdims=True))


def rescale(weights: Float[Array, "BT A"], *, normalize: float | None, restore_scale: bool, scale: float) -> Float[Array, "BT A"]:
    """Divide by the p-norm over a token's experts (p = normalize), then multiply by top_k if restore_scale, then by scale."""
    if normalize is not None:
        # Powers of numbers <= 1 cannot overflow. The norm is homogeneous, so a constant factor changes no gradient.
        top = lax.stop_gradient(weights.max(axis=-1, keepdims=True))
        largest = jnp.maximum(top, _SMALLEST_NORM)
        powers = ((weights / largest) ** normalize).sum(axis=-1, keepdims=True)
        # Not `powers < 1`: that holds by rounding too, where one weight dwarfs the others, and would cut off its gradient.
        norm = largest * jnp.where(top < _SMALLEST_NORM, 1.0, powers) ** (1 / normalize)
        weights = weights / norm
    if restore_scale:
        weights = weights * weights.shape[1]
    return weights * scale


def uniform_experts(token_index: Int[Array, " BT"], *, num_experts: int, top_k: int) -> Int[Array, "BT A"]:
    """Experts (token_index * top_k + j) mod num_experts: an exactly even load over num_experts tokens in a row."""
    return ((token_index % num_experts)[:, None] * top_k + jnp.arange(top_k, dtype=jnp.int32)[None, :]) % num_experts


def random_scores(
    token_index: Int[Array, " BT"], *, num_experts: int, seed: Int[Array, ""] | int, step: Int[Array, ""], layer: Int[Array, ""]
) -> Float[Array, "BT E"]:
    """Uniform numbers in (0, 1), a hash of (seed, step, layer, token, expert): the same on every mesh and in a recompute."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    return uniform([seed, step, layer, token_index[:, None], expert[None, :]])


def update_bias(bias: Float[Array, "L E"], counts: Float[Array, "L E"], rate: float) -> Float[Array, "L E"]:
    """Raise the bias of experts below the mean count by `rate`, lower it above (Wang et al. 2024, arXiv 2408.15664)."""
    return bias + rate * jnp.sign(counts.mean(axis=-1, keepdims=True) - counts)
