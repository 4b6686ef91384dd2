"""Drawing, and generation with a cache against the oracle run anew on the whole text for every token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.generate import make_sampler
from moejax.generate.sample import draw
from moejax.parallel import make_mesh
from tests.oracle import step_oracle
from tests.oracle.compare import MIN_MARGIN, cast
from tests.oracle.examples import VOCAB, model_config, on_mesh, parameters, train_config

SEQ_LEN, NEW = 8, 9
MODEL = model_config(
    norm_placement="peri",
    embed_scale=4.0,
    moe={"capacity_factor": 0.1},
    attention={"qk_norm": "head", "window_pattern": (-1, 3), "full_attention_ends": False},
)
CONFIG = train_config(MODEL, seq_len=SEQ_LEN)
PARAMS = parameters(MODEL)
BIAS = np.random.default_rng(5).normal(size=(2, 8)).astype(np.float32)


def greedy(prompt):
    """The likeliest token after the whole text so far, one after the other, in float64, with no cache and no capacity."""
    moe = dataclasses.replace(MODEL.moe, capacity_factor=None)
    windows = dataclasses.replace(MODEL.attention, window_pattern=(SEQ_LEN, 3))  # as far back as in training
    model, tokens = dataclasses.replace(MODEL, moe=moe, attention=windows), prompt
    for _ in range(NEW):
        rows, length = tokens.shape
        ones = np.ones((rows, length), int)
        batch = {"tokens": tokens, "labels": -ones, "segment_ids": ones, "positions": np.arange(length) * ones}
        truth = step_oracle(PARAMS, BIAS, batch, model, gradients=False)
        logits = truth.logits[:, -1]
        ranked = np.sort(logits, axis=1)
        assert truth.margin > MIN_MARGIN, "the case holds a near-tie of router scores; choose another seed"
        assert (ranked[:, -1] - ranked[:, -2]).min() > 1e-4, "the case holds a near-tie of tokens; choose another seed"
        tokens = np.concatenate([tokens, logits.argmax(axis=1)[:, None]], axis=1)
    return tokens[:, prompt.shape[1] :]


@pytest.mark.parametrize(("mesh", "pp", "length"), [((1, 1), 1, 13), ((1, 2), 1, 4), ((1, 2), 2, 4)], ids=["one device", "ep2", "stages"])
def test_cached_generation_equals_whole_forward_passes(mesh, pp, length):
    """The text grows beyond the sequences of training; in the first case the prompt alone is longer than they are."""
    config = on_mesh(CONFIG, *mesh)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, pp=pp))
    prompt = np.random.default_rng(length).integers(0, VOCAB, (2, length)).astype(np.int32)
    sampler = make_sampler(config, make_mesh(config.mesh), max_new_tokens=NEW, temperature=0, top_p=1.0)
    drawn = sampler(cast(PARAMS, config), {"bias": BIAS}, prompt, jax.random.key(0))
    assert drawn.dtype == jnp.int32
    expected = greedy(prompt)
    assert len(np.unique(expected)) > 4
    np.testing.assert_array_equal(drawn, expected)


LOGITS = np.log([0.02, 0.4, 0.08, 0.2, 0.3]).astype(np.float32)
DRAWS = 4000
draw_many = jax.jit(draw, static_argnames=("temperature", "top_p"))


def frequencies(temperature, top_p, seed=0):
    tokens = draw_many(jax.random.key(seed), jnp.tile(LOGITS, (DRAWS, 1)), temperature=temperature, top_p=top_p)
    return np.bincount(tokens, minlength=5) / DRAWS


def nucleus(temperature, top_p):
    """Probabilities of the shortest prefix of falling probability that reaches top_p, made to sum to 1."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p, kept, total = p / p.sum(), np.zeros(5), 0.0
    for token in np.argsort(-p):
        if total < top_p:
            kept[token], total = p[token], total + p[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "support"),
    [(1.0, 1.0, 5), (1.0, 0.65, 2), (1.0, 0.75, 3), (1.0, 0.39, 1), (1.0, 1e-6, 1), (2.0, 0.9, 4), (0.5, 0.9, 3)],
)
def test_draws_follow_the_probabilities_inside_top_p_and_never_leave_it(temperature, top_p, support):
    expected, observed = nucleus(temperature, top_p), frequencies(temperature, top_p)
    assert (expected > 0).sum() == support
    assert not observed[expected == 0].any()
    np.testing.assert_array_less(np.abs(observed - expected), 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-9)


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals():
    logits = jnp.array([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    assert draw(jax.random.key(0), logits, temperature=0, top_p=0.5).tolist() == [1, 0]


def test_a_key_decides_the_draws_and_rows_differ():
    logits = jnp.zeros((64, 50))
    first, again, other = (np.asarray(draw_many(jax.random.key(seed), logits, temperature=1.0, top_p=1.0)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9
    assert len(np.unique(first)) > 20
