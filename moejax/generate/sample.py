"""Draw tokens one after the other, with keys and values kept in a cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.config import TrainConfig
from moejax.generate.stages import empty_caches, run_blocks
from moejax.nn import Tokens
from moejax.parallel import DATA_AXES
from moejax.train.state import make_layout, state_specs

Sampler = Callable[[dict, dict, jax.Array, jax.Array], jax.Array]


def make_sampler(config: TrainConfig, mesh: Mesh, *, max_new_tokens: int, temperature: float, top_p: float) -> Sampler:
    """A jitted (params, router state, prompt int32 [B, T], key) -> int32 [B, max_new_tokens], for any mesh.

    B divides by mesh.dp x mesh.ep; every rank continues its own rows, and experts work for all of them. Routing is dropless.
    Attention sees no more than the data.seq_len tokens of training at once, so texts may be longer than that.
    """
    layout = make_layout(config, mesh)
    model, specs = layout.model, state_specs(config, layout)

    def generate(params, router, prompt, key):
        rows, length = prompt.shape
        key = jax.random.fold_in(key, lax.axis_index(DATA_AXES))
        caches = empty_caches(config, model, rows, length + max_new_tokens)

        def forward(ids, start, caches):
            tokens = _tokens(ids.shape, start, config.seed)
            x, caches = run_blocks(config, model, params, router, model.embed(params, ids), tokens, caches)
            return model.logits(params, x[:, -1]), caches

        def advance(carry, place):
            logits, caches = carry
            token = draw(jax.random.fold_in(key, place), logits, temperature=temperature, top_p=top_p)
            return forward(token[:, None], length + place, caches), token

        first = forward(prompt, jnp.int32(0), caches)
        _, tokens = lax.scan(advance, first, jnp.arange(max_new_tokens, dtype=jnp.int32))
        return tokens.T

    mapped = jax.shard_map(
        generate, mesh=mesh, in_specs=(specs.params, specs.router, P(DATA_AXES), P()), out_specs=P(DATA_AXES), check_vma=False
    )
    return jax.jit(mapped)


def draw(key: jax.Array, logits: Float[Array, "B V"], *, temperature: float, top_p: float) -> Int[Array, " B"]:
    """One token a row from the smallest set of likeliest tokens that holds top_p of the probability (Holtzman et al. 2020).

    Temperature 0 takes the likeliest token.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p == 1:
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
    falling = jnp.sort(logits, axis=-1, descending=True)
    share = jax.nn.softmax(falling, axis=-1)
    is_inside = (jnp.cumsum(share, axis=-1) - share < top_p).at[:, 0].set(True)
    least = jnp.min(jnp.where(is_inside, falling, jnp.inf), axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(logits >= least, logits, -jnp.inf), axis=-1).astype(jnp.int32)


def _tokens(shape: tuple[int, int], start: jax.Array, seed: int) -> Tokens:
    place = jnp.broadcast_to(start + jnp.arange(shape[1], dtype=jnp.int32)[None, :], shape)
    return Tokens(jnp.ones(shape, jnp.int32), place, place, place, jnp.int32(seed), jnp.int32(0))
