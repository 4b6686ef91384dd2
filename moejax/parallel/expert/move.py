"""Rows between ranks: dispatch to the experts, combine back. Each is the other's backward pass.

A transport moves ragged chunks of rows both ways, `there` (sorted routes -> expert buffers) and `back`. All transports give
equal rows; rows of a buffer that nobody writes are zero.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax.parallel.expert.choice import Transport
from moejax.parallel.expert.plan import Plan


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch(x: Float[Array, "T D"], plan: Plan, rows: int, axis: str, transport: Transport) -> Float[Array, "rows D"]:
    """Copy each token to the buffer row of each of its kept routes, on the expert's rank."""
    top_k = plan.order.shape[0] // x.shape[0]
    return _there(x[plan.order // top_k], plan, rows, axis, transport)


def _dispatch_forward(x, plan, rows, axis, transport):
    return dispatch(x, plan, rows, axis, transport), (plan, x.shape[0])


def _dispatch_backward(rows, axis, transport, residuals, g):
    plan, tokens = residuals
    routes = _back(g, plan, axis, transport)[plan.place].reshape(tokens, -1, g.shape[1])
    return routes.astype(jnp.float32).sum(axis=1).astype(g.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def combine(y: Float[Array, "rows D"], weights: Float[Array, "T A"], plan: Plan, axis: str, transport: Transport) -> Float[Array, "T D"]:
    """Bring each route's row back and add up a token's rows by weight, in float32. A dropped route adds zero."""
    return _weighted_sum(_rows_by_token(y, weights, plan, axis, transport), weights).astype(y.dtype)


def _combine_forward(y, weights, plan, axis, transport):
    rows = checkpoint_name(_rows_by_token(y, weights, plan, axis, transport), "expert_out")
    return _weighted_sum(rows, weights).astype(y.dtype), (rows, weights, plan, y.shape[0])


def _combine_backward(axis, transport, residuals, g):
    rows, weights, plan, buffer = residuals
    d_weights = jnp.einsum("tad,td->ta", rows, g, preferred_element_type=jnp.float32).astype(weights.dtype)
    d_rows = (g[:, None, :] * weights[:, :, None].astype(g.dtype)).reshape(-1, g.shape[1])
    return _there(d_rows[plan.order], plan, buffer, axis, transport), d_weights, None


combine.defvjp(_combine_forward, _combine_backward)


def _rows_by_token(y, weights, plan, axis, transport):
    return _back(y, plan, axis, transport)[plan.place].reshape(*weights.shape, y.shape[1])


def _weighted_sum(rows, weights):
    return jnp.einsum("tad,ta->td", rows, weights, preferred_element_type=jnp.float32)


def _there(routes, plan, rows, axis, transport):
    """Sorted routes [R, D] -> this rank's expert buffer [rows, D]."""
    if transport == "ragged":
        empty = jnp.zeros((rows, routes.shape[1]), routes.dtype)
        return lax.ragged_all_to_all(routes, empty, plan.send_offset, plan.send_size, plan.send_start, plan.receive_size, axis_name=axis)
    return _gather_there(routes, plan, rows, axis)


def _back(y, plan, axis, transport):
    """Expert buffer [rows, D] -> this rank's sorted routes [R, D], zero where dropped."""
    if transport == "ragged":
        empty = jnp.zeros((plan.order.shape[0], y.shape[1]), y.dtype)
        return lax.ragged_all_to_all(y, empty, plan.receive_start, plan.receive_size, plan.receive_origin, plan.send_size, axis_name=axis)
    return _gather_back(y, plan, axis)


def _gather_there(routes, plan, rows, axis):
    ranks = lax.axis_size(axis)
    # Chunks in (x, source) order start at rising rows; an empty chunk starts where the next one does.
    by_expert = [a.reshape(ranks, -1).T.reshape(-1) for a in (plan.receive_start, plan.receive_size, plan.receive_origin)]
    start, size, origin = by_expert
    row = jnp.arange(rows, dtype=jnp.int32)
    chunk = jnp.maximum(jnp.searchsorted(start, row, side="right") - 1, 0)
    inside = row - start[chunk]
    source = (chunk % ranks) * routes.shape[0] + origin[chunk] + inside
    everything = lax.all_gather(routes, axis, tiled=True)
    return _take_or_zero(everything, source, (inside >= 0) & (inside < size[chunk]))


def _gather_back(y, plan, axis):
    local = plan.group_sizes.shape[0]
    kept = plan.kept[plan.order]
    inside = jnp.arange(plan.order.shape[0], dtype=jnp.int32) - plan.send_offset[plan.expert]
    source = (plan.expert // local) * y.shape[0] + plan.send_start[plan.expert] + inside
    return _take_or_zero(lax.all_gather(y, axis, tiled=True), source, kept)


def _take_or_zero(x, index, wanted):
    picked = jnp.take(x, jnp.where(wanted, index, 0), axis=0)
    return jnp.where(wanted[:, None], picked, jnp.zeros((), x.dtype))
