"""dense: one padded all-to-all, each pair of ranks with room for all that one could ever send the other, so that it drops nothing more.

That worst case is min(capacity, T * min(A, X)) rows a pair, ep times as many in all: with capacity and X >= A, as much as all
ranks' routes together. Both staging buffers, sent and received, have that size; `ragged` moves T * A rows. It is for devices
and networks where only a plain all-to-all works well.
"""

import jax.numpy as jnp
from jax import lax

from moejax.parallel.expert.plan import row_sources
from moejax.parallel.expert.transports.rows import row_transport, take_or_zero


def _prepare(plan, axis):
    """Sorted route of each slot sent, slot of each row received; row of each slot returned, slot of each route returned."""
    ranks, local = lax.axis_size(axis), plan.group_sizes.shape[0]
    slots = ranks * plan.pair_rows
    first_place = plan.send_offset.reshape(ranks, local)[:, 0]  # of the routes for each peer
    send = first_place[:, None] + jnp.arange(plan.pair_rows, dtype=jnp.int32)[None, :]
    source, place, is_real = row_sources(plan)
    first_there = plan.receive_origin.reshape(ranks, local)[:, 0]
    received = jnp.where(is_real, source * plan.pair_rows + place - first_there[source], slots)
    rows = jnp.arange(plan.rows, dtype=jnp.int32)
    give_back = jnp.full((slots,), plan.rows, jnp.int32).at[received].set(rows, mode="drop")
    peer = plan.expert[plan.place] // local
    returned = jnp.where(plan.kept, peer * plan.pair_rows + plan.place - first_place[peer], slots)
    return send.reshape(-1), received, give_back, returned


def _there(routes, plan, moves, axis):
    send, received, _, _ = moves
    return take_or_zero(_exchange(take_or_zero(routes, send), axis), received)


def _back(y, plan, moves, axis):
    _, _, give_back, returned = moves
    return take_or_zero(_exchange(take_or_zero(y, give_back), axis), returned)


def _exchange(x, axis):
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


DENSE = row_transport("dense", _there, _back, _prepare)
