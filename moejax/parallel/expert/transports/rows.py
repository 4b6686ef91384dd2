"""Transports that move one row for each route: dispatch and combine are each other's backward pass.

Such a transport is two moves of rows, `there` (sorted routes -> expert buffers) and `back` (expert buffers -> routes), used
twice each: dispatch and the gradient of combine go there, combine and the gradient of dispatch come back.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax.parallel.expert.plan import Plan
from moejax.parallel.expert.transports.transport import Transport


def row_transport(
    name: str,
    there: Callable[[jax.Array, Plan, Any, str], jax.Array],
    back: Callable[[jax.Array, Plan, Any, str], jax.Array],
    prepare: Callable[[Plan, str], Any] = lambda plan, axis: None,
    **limits: Callable[[str, int], str | None],
) -> Transport:
    """The transport made of two moves.

    Args:
        there: (routes [R, D] sorted by expert, plan, moves, axis) -> buffer [rows, D], zero where no row lies.
        back: (buffer [rows, D], plan, moves, axis) -> [R, D] in the order of the routes, zero where dropped.
        prepare: (plan, axis) -> moves.
        limits: refusal and warning of the Transport.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def dispatch(x: Float[Array, "T D"], plan: Plan, moves, axis: str) -> Float[Array, "rows D"]:
        return there(x[_token(plan, x)], plan, moves, axis)

    def dispatch_forward(x, plan, moves, axis):
        return dispatch(x, plan, moves, axis), (plan, moves, x.shape[0])

    def dispatch_backward(axis, residuals, g):
        plan, moves, tokens = residuals
        routes = back(g, plan, moves, axis).reshape(tokens, -1, g.shape[1])
        return routes.astype(jnp.float32).sum(axis=1).astype(g.dtype), None, None

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def combine(y: Float[Array, "rows D"], weights: Float[Array, "T A"], plan: Plan, moves, axis: str) -> Float[Array, "T D"]:
        return combine_forward(y, weights, plan, moves, axis)[0]

    def combine_forward(y, weights, plan, moves, axis):
        rows = back(y, plan, moves, axis).reshape(*weights.shape, y.shape[1])
        rows = checkpoint_name(rows, "expert_out")
        sums = jnp.einsum("tad,ta->td", rows, weights, preferred_element_type=jnp.float32)
        return sums.astype(y.dtype), (rows, weights, plan, moves)

    def combine_backward(axis, residuals, g):
        rows, weights, plan, moves = residuals
        d_weights = jnp.einsum("tad,td->ta", rows, g, preferred_element_type=jnp.float32).astype(weights.dtype)
        d_routes = g[_token(plan, g)] * weights.reshape(-1)[plan.order, None].astype(g.dtype)
        return there(d_routes, plan, moves, axis), d_weights, None, None

    dispatch.defvjp(dispatch_forward, dispatch_backward)
    combine.defvjp(combine_forward, combine_backward)
    return Transport(name=name, prepare=prepare, dispatch=dispatch, combine=combine, **limits)


def take_or_zero(x: Float[Array, "N D"], index: jax.Array) -> jax.Array:
    """Rows of x; an index of N or more stands for a row of zeros."""
    return x.at[index].get(mode="fill", fill_value=0)


def _token(plan, x):
    """Token of each sorted route."""
    return plan.order // (plan.order.shape[0] // x.shape[0])
