"""The attention module against a loop over heads in float64, with and without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.nn.attention import Attention
from moejax.nn.param import make_template
from moejax.nn.tokens import Tokens, tokens_of
from moejax.testing import assert_trees_close
from tests.oracle.examples import batch, model_config, parameters
from tests.oracle.model import attention as exact_attention
from tests.oracle.model import layer_of

ROWS, LENGTH = 4, 7
DATA = batch(ROWS, LENGTH, documents=True, padding=True, seed=2)


def case(**attention):
    """A config, its parameters of one layer, and inputs."""
    config = model_config(attention={"num_heads": 4, "num_kv_heads": 2} | attention)
    params = layer_of(parameters(config)["moe_blocks"]["attention"], 0)
    return config, params, np.random.default_rng(1).normal(size=(ROWS, LENGTH, 16)).astype(np.float32)


@functools.lru_cache
def module_of(config):
    template = make_template(lambda: Attention(config))
    return jax.jit(lambda params, x, tokens, window, cache: template.bind(params)(x, tokens, window, cache=cache))


def exact(config, params, x, data, window):
    double = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    return exact_attention(double, x.astype(np.float64), data, config.attention, window, config.norm_eps)


@pytest.mark.parametrize("qk_norm", ["none", "head", "width"])
@pytest.mark.parametrize("window", [-1, 3])
def test_equals_the_oracle_with_documents_and_padding(qk_norm, window):
    config, params, x = case(qk_norm=qk_norm)
    tokens = tokens_of(jnp.asarray(DATA["segment_ids"]), jnp.asarray(DATA["positions"]), first_row=0, seed=0, step=jnp.int32(0))
    y, cache = module_of(config)(params, x, tokens, jnp.int32(window), None)
    assert cache is None
    assert_trees_close({"y": y}, {"y": exact(config, params, x, DATA, window)}, "float32", "attention")


def test_bfloat16_stays_bfloat16_and_norm_gains_float32():
    config, params, x = case(qk_norm="head")
    low = {name: value if "norm" in name else jnp.asarray(value, jnp.bfloat16) for name, value in params.items()}
    tokens = tokens_of(jnp.asarray(DATA["segment_ids"]), jnp.asarray(DATA["positions"]), first_row=0, seed=0, step=jnp.int32(0))
    y, _ = module_of(config)(low, jnp.asarray(x, jnp.bfloat16), tokens, jnp.int32(-1), None)
    assert y.dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), low)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    assert_trees_close({"y": y}, {"y": exact(config, rounded, x, DATA, -1)}, "bfloat16", "attention")


@pytest.mark.parametrize("window", [-1, 3])
def test_a_cache_gives_the_whole_sequence_piece_by_piece(window):
    """A prompt of 4, one token, two tokens; the cache has room for more."""
    config, params, x = case(qk_norm="head")
    plain = {"segment_ids": np.ones((ROWS, LENGTH), int), "positions": np.tile(np.arange(LENGTH), (ROWS, 1))}
    truth = exact(config, params, x, plain, window)
    cache = {name: jnp.zeros((ROWS, LENGTH + 3, 2, 4)) for name in ("k", "v")}
    pieces = []
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        place = jnp.asarray(np.tile(np.arange(start, stop), (ROWS, 1)), jnp.int32)
        tokens = Tokens(jnp.ones_like(place), place, place, place, jnp.int32(0), jnp.int32(0))
        y, cache = module_of(config)(params, x[:, start:stop], tokens, jnp.int32(window), cache)
        pieces.append(np.asarray(y))
    assert not np.asarray(cache["k"])[:, LENGTH:].any()
    assert_trees_close({"y": np.concatenate(pieces, axis=1)}, {"y": truth}, "float32", "pieces")


def test_tokens_of_consecutive_ranks_count_on():
    segment = jnp.array([[1, 1, 0], [1, 2, 2]], jnp.int32)
    parts = [tokens_of(segment, jnp.zeros_like(segment), first_row=row, seed=3, step=jnp.int32(4)) for row in (0, 2)]
    assert [part.index.tolist() for part in parts] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert parts[1].place.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert parts[0].valid.tolist() == [[True, True, False], [True, True, True]]
    assert (int(parts[0].seed), int(parts[0].step)) == (3, 4)
