"""The mixture-of-experts layer as a dense computation: every expert on every token, weighted by zero where it was not chosen."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def plain(state: nnx.State) -> dict:
    """Arrays of an NNX state as a nested dict, on the host."""
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


def dense_moe(params: dict, x: jax.Array, *, top_k: int, devices: int = 1, valid: np.ndarray | None = None) -> tuple[jax.Array, dict]:
    """Softmax router whose top_k scores are scaled to sum 1, optionally one shared expert; statistics as moejax.nn.MoELayer reports.

    Args:
        params: {"router": {"w_router"}, "experts": {"w_in", "w_out"}, "shared": the same with a leading 1}.
        devices: the local balance loss is that of this many equal parts of the tokens, padding at the end.
    """
    w_router, experts = params["router"]["w_router"], params["experts"]
    flat = x.reshape(-1, x.shape[-1])
    real = np.ones(len(flat), bool) if valid is None else valid.reshape(-1)
    logits = flat @ w_router
    shares = jax.nn.softmax(logits)
    chosen = jnp.argsort(-shares, axis=1)[:, :top_k]
    mask = jax.nn.one_hot(chosen, shares.shape[1]).sum(axis=1) * real[:, None]
    weights = shares * mask / jnp.where(real[:, None], (shares * mask).sum(axis=1, keepdims=True), 1.0)
    y = jnp.einsum("te,ted->td", weights, _swiglu(experts, flat))
    if "shared" in params:
        y = y + _swiglu(params["shared"], flat)[:, 0]
    size = -(-len(flat) // devices)
    balance = 0.0
    for start in range(0, len(flat), size):
        part = slice(start, start + size)
        count = max(real[part].sum(), 1)
        mean_share = (shares * real[:, None])[part].sum(axis=0) / count
        balance += shares.shape[1] / top_k * (jax.lax.stop_gradient(mask[part].sum(axis=0)) * mean_share).sum()
    z = jnp.where(real, jax.nn.logsumexp(logits, axis=1) ** 2, 0.0).sum()
    stats = {"balance_loss": balance / real.sum(), "z_loss": z / real.sum(), "counts": mask.sum(axis=0)}
    return y.reshape(x.shape), stats


def _swiglu(weights: dict, x: jax.Array) -> jax.Array:
    """Every expert's output for every token, [tokens, experts, D]."""
    hidden = jnp.einsum("td,edgf->tegf", x, weights["w_in"])
    return jnp.einsum("tef,efd->ted", jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], weights["w_out"])
