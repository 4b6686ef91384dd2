"""Transports that share tokens instead of moving routes: every rank sees all ranks' tokens and adds up what its experts return.

Such a transport is two functions: `share` (an array of each rank -> all of them, in rank order) and `reduce` (the sum over ranks of
an array made for all of them -> this rank's part). Weights are applied on the expert's rank, before the sum.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moejax.parallel.expert.plan import Plan, row_sources
from moejax.parallel.expert.transports.rows import take_or_zero
from moejax.parallel.expert.transports.transport import Transport


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Meeting:
    """How my buffer and the routes of all ranks meet, int32. Routes are counted over all ranks: ep * R of them.

    route: [rows], the route in each row; ep * R where there is none.
    row: [ep * R], the row of each route; `rows` where it has none here.
    """

    route: Array
    row: Array


def token_transport(name: str, share: Callable[..., jax.Array], reduce: Callable[..., jax.Array]) -> Transport:
    """The transport made of two collectives, share(x, axis) and reduce(x, axis)."""

    def prepare(plan: Plan, axis: str | None) -> Meeting:
        source, place, is_real = row_sources(plan)
        orders = share(plan.order, axis)
        first = source * plan.order.shape[0]
        route = jnp.where(is_real, first + orders[jnp.where(is_real, first + place, 0)], orders.shape[0])
        nowhere = jnp.full(orders.shape, plan.rows, jnp.int32)
        return Meeting(route, nowhere.at[route].set(jnp.arange(plan.rows, dtype=jnp.int32), mode="drop"))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
    def dispatch(x: Float[Array, "T D"], plan: Plan, moves: Meeting, axis: str | None) -> Float[Array, "rows D"]:
        return dispatch_forward(x, plan, moves, axis)[0]

    def dispatch_forward(x, plan, moves, axis):
        x = share(x, axis)
        return _token_of_row(x, moves), (moves, x.shape[0])

    def dispatch_backward(axis, residuals, g):
        moves, tokens = residuals
        rows = moves.row.reshape(tokens, -1)
        sums = _sum_over_slots(g, rows, jnp.ones(rows.shape, jnp.float32))
        return reduce(sums, axis).astype(g.dtype), None, None

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
    def combine(
        y: Float[Array, "rows D"], weights: Float[Array, "T A"], plan: Plan, moves: Meeting, axis: str | None
    ) -> Float[Array, "T D"]:
        return combine_forward(y, weights, plan, moves, axis)[0]

    def combine_forward(y, weights, plan, moves, axis):
        y, weights = checkpoint_name(y, "expert_out"), share(weights, axis)
        sums = _sum_over_slots(y, moves.row.reshape(weights.shape), weights)
        return reduce(sums, axis).astype(y.dtype), (y, weights, moves)

    def combine_backward(axis, residuals, g):
        y, weights, moves = residuals
        g_rows = _token_of_row(share(g, axis), moves)
        of_row = weights.reshape(-1).at[moves.route].get(mode="fill", fill_value=0)
        products = jnp.einsum("rd,rd->r", y, g_rows, preferred_element_type=jnp.float32)
        d_weights = products.at[moves.row].get(mode="fill", fill_value=0).reshape(weights.shape)
        return g_rows * of_row[:, None].astype(g.dtype), reduce(d_weights, axis).astype(weights.dtype), None, None

    dispatch.defvjp(dispatch_forward, dispatch_backward)
    combine.defvjp(combine_forward, combine_backward)
    return Transport(name=name, prepare=prepare, dispatch=dispatch, combine=combine)


def _token_of_row(x, moves):
    """All ranks' tokens -> the token of each row, zero where no route lies."""
    top_k = moves.row.shape[0] // x.shape[0]
    return take_or_zero(x, moves.route // top_k)


def _sum_over_slots(y, rows, weights):
    """Each token's weighted sum of rows, in float32. Slot by slot, so that XLA fuses it into one loop that holds no copies of rows."""
    total = jnp.zeros((rows.shape[0], y.shape[1]), jnp.float32)
    for slot in range(rows.shape[1]):
        total = total + take_or_zero(y, rows[:, slot]).astype(jnp.float32) * weights[:, slot, None]
    return total
