"""The forward pass of generation: all blocks with their caches, also where pipeline ranks hold them in stages."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moejax.config import TrainConfig
from moejax.nn import Cache, Tokens, Transformer, forward
from moejax.parallel.pipeline import schedule_of, split_of
from moejax.train.pieces import rows_of

Caches = dict[str, Cache]


def empty_caches(config: TrainConfig, model: Transformer, batch: int, places: int) -> Caches:
    """Zero keys and values of this rank's blocks."""
    caches = model.empty_caches(batch, places, jnp.dtype(config.model.dtype))
    if config.mesh.pp == 1:
        return caches
    here = split_of(config).blocks[0].size
    return caches | {"moe_blocks": jax.tree.map(lambda a: jnp.zeros((here, *a.shape[1:]), a.dtype), caches["moe_blocks"])}


def run_blocks(
    config: TrainConfig, model: Transformer, params: dict, router: dict, x: Float[Array, "B T D"], tokens: Tokens, caches: Caches
) -> tuple[Float[Array, "B T D"], Caches]:
    """x behind all blocks, on every rank, inside shard_map over the mesh. No layer looks further back than a sequence of training."""
    seen = config.data.seq_len
    if config.mesh.pp == 1:
        x, _, new = model.blocks(params, router, x, tokens, dropless=True, caches=caches, max_window=seen)
        assert new is not None
        return x, new
    caches = dict(caches)
    if "dense_blocks" in caches:
        cache = caches["dense_blocks"]
        layers = model.layers("dense_blocks", params["dense_blocks"], {}, tokens, dropless=True, cache=cache, max_window=seen)
        x, (_, caches["dense_blocks"]) = forward(layers, x)
    split, place, me = split_of(config), schedule_of(config, 1).order.place, lax.axis_index("pp")
    room = split.blocks.shape[-1]

    def stage(carry, its):
        """Every rank runs one of its stages; what counts is that of the rank which has this one."""
        (x, whole), (rank, number) = carry, its
        cache = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, number * room, room), whole)
        rows = rows_of(config.model, split, number)
        layers = model.layers("moe_blocks", params["moe_blocks"], router, tokens, dropless=True, rows=rows, cache=cache, max_window=seen)
        y, (_, new) = forward(layers, x)
        new = jax.tree.map(lambda after, before: jnp.where(me == rank, after, before), new, cache)
        whole = jax.tree.map(lambda a, part: lax.dynamic_update_slice_in_dim(a, part, number * room, 0), whole, new)
        return (lax.psum(jnp.where(me == rank, y, jnp.zeros((), y.dtype)), "pp"), whole), None

    numbers = [place[:s].count(rank) for s, rank in enumerate(place)]
    turns = jnp.asarray(place, jnp.int32), jnp.asarray(numbers, jnp.int32)
    (x, caches["moe_blocks"]), _ = lax.scan(stage, (x, caches["moe_blocks"]), turns)
    return x, caches
