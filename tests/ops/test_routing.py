"""Choosing and weighing experts against a plain NumPy model; uniform and random assignment; the bias update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax.config import MeshConfig
from moejax.ops.routing import random_scores, rescale, route, uniform_experts, update_bias
from moejax.parallel import make_mesh
from moejax.testing import assert_trees_close

E, A = 8, 3
GATINGS = ("softmax", "sigmoid", "topk_softmax")
every_gating = pytest.mark.parametrize("gating", GATINGS)
choose = jax.jit(route, static_argnames=("top_k", "gating"))


def logits_of(seed=0, tokens=20):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(tokens, E)) * 2, jnp.float32)


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def model(logits, bias, gating):
    """Experts, weights and shares in float64, one token at a time."""
    experts, weights, shares = [], [], []
    for row in np.asarray(logits, np.float64):
        scores = 1 / (1 + np.exp(-row)) if gating == "sigmoid" else softmax(row)
        ranking = (row if gating == "topk_softmax" else scores) + bias
        chosen = sorted(range(E), key=lambda e: (-ranking[e], e))[:A]
        experts.append(chosen)
        weights.append(softmax(row[chosen]) if gating == "topk_softmax" else scores[chosen])
        shares.append(scores / scores.sum())
    return np.array(experts), np.array(weights), np.array(shares)


@every_gating
@pytest.mark.parametrize("is_biased", [False, True])
def test_experts_weights_and_shares_equal_the_model(gating, is_biased):
    bias = np.random.default_rng(9).normal(size=E) if is_biased else np.zeros(E)
    routes = choose(logits_of(), jnp.asarray(bias, jnp.float32) if is_biased else None, top_k=A, gating=gating)
    experts, weights, shares = model(logits_of(), bias.astype(np.float32), gating)
    np.testing.assert_array_equal(routes.experts, experts)
    assert_trees_close({"weights": routes.weights, "shares": routes.shares}, {"weights": weights, "shares": shares}, "float32", gating)


@every_gating
def test_ties_go_to_the_lower_expert(gating):
    logits = jnp.zeros((2, E)).at[1, jnp.array([2, 5])].set(1.0)
    assert choose(logits, None, top_k=A, gating=gating).experts.tolist() == [[0, 1, 2], [2, 5, 0]]


@every_gating
def test_the_bias_selects_but_does_not_weigh(gating):
    logits = logits_of(1)
    forced = choose(logits, jnp.full(E, -100.0).at[jnp.array([6, 1, 3])].set(100.0), top_k=A, gating=gating)
    assert np.sort(forced.experts).tolist() == [[1, 3, 6]] * 20
    fixed = choose(logits, None, top_k=A, gating=gating, fixed_experts=forced.experts)
    for with_bias, without in zip(forced, fixed, strict=True):
        np.testing.assert_array_equal(with_bias, without)
    bias_grad = jax.grad(lambda bias: choose(logits, bias, top_k=A, gating=gating).weights.sum())(jnp.zeros(E))
    np.testing.assert_array_equal(bias_grad, 0)


@every_gating
def test_gradient_of_weights_equals_a_finite_difference_with_the_choice_held(gating):
    logits = logits_of(2, tokens=2)
    pull = np.random.default_rng(3).normal(size=(2, A))
    grad = jax.grad(lambda x: (choose(x, None, top_k=A, gating=gating).weights * jnp.asarray(pull, jnp.float32)).sum())(logits)
    x = np.asarray(logits, np.float64)
    expected = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[at] += 1e-5
        behind[at] -= 1e-5
        expected[at] = ((model(ahead, 0, gating)[1] - model(behind, 0, gating)[1]) * pull).sum() / 2e-5
    assert_trees_close({"grad": grad}, {"grad": expected}, "float32", gating)


def test_sigmoid_scores_of_very_negative_logits_keep_weights_and_gradients_finite():
    logits = jnp.full((1, E), -200.0)

    def weights(x):
        routes = route(x, None, top_k=A, gating="sigmoid")
        return rescale(routes.weights, normalize=2.0, restore_scale=False, scale=1.0)

    np.testing.assert_allclose(weights(logits), 3**-0.5, rtol=1e-5)
    assert np.isfinite(jax.jit(jax.jacobian(weights))(logits)).all()


@pytest.mark.parametrize("normalize", [None, 1.0, 2.0, 16.0])
@pytest.mark.parametrize("restore_scale", [False, True])
def test_rescale_divides_by_the_p_norm_and_restores(normalize, restore_scale):
    weights = np.random.default_rng(4).random((6, A)) + 0.01
    norm = 1.0 if normalize is None else (weights**normalize).sum(axis=1, keepdims=True) ** (1 / normalize)
    expected = weights / norm * (A if restore_scale else 1) * 2.5
    y = rescale(jnp.asarray(weights, jnp.float32), normalize=normalize, restore_scale=restore_scale, scale=2.5)
    assert_trees_close({"weights": y}, {"weights": expected}, "float32", f"p {normalize}")


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 3), (7, 7), (40, 6)])
@pytest.mark.parametrize("first", [0, 5, 2**31 - 100])
def test_uniform_experts_are_distinct_and_even_over_any_run_of_tokens(num_experts, top_k, first):
    index = jnp.asarray(np.arange(first, first + 100), jnp.int32)
    experts = np.asarray(jax.jit(uniform_experts, static_argnames=("num_experts", "top_k"))(index, num_experts=num_experts, top_k=top_k))
    assert all(len(set(row)) == top_k for row in experts.tolist())
    load = (experts[:, :, None] == np.arange(num_experts)).sum(axis=1).cumsum(axis=0)
    assert (np.ptp(load, axis=1) <= 1).all()
    assert (load.sum(axis=1) == top_k * np.arange(1, 101)).all()


scores_of = jax.jit(lambda index, seed, step, layer: random_scores(index, num_experts=E, seed=seed, step=step, layer=layer))


def random_experts(index, *, seed=0, step=0, layer=0):
    scores = scores_of(jnp.asarray(index, jnp.int32), jnp.int32(seed), jnp.int32(step), jnp.int32(layer))
    return choose(jnp.zeros((len(index), E)), None, top_k=A, gating="softmax", replaced_scores=scores).experts


def test_random_experts_are_distinct_and_equally_frequent():
    experts = np.asarray(random_experts(np.arange(8000)))
    assert (np.diff(np.sort(experts), axis=1) > 0).all()
    for place in range(A):  # each expert is as likely to be first, second or third
        counts = np.bincount(experts[:, place], minlength=E)
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 30  # chi-square with 7 degrees of freedom


def test_random_experts_follow_the_global_token_index_in_any_order():
    whole = np.asarray(random_experts(np.arange(64)))
    shuffled = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(random_experts(shuffled), whole[shuffled])


@pytest.mark.parametrize("spec", [("dp",), (("dp", "ep"),), (None, "ep")])
def test_random_scores_are_the_same_on_any_mesh(spec):
    sharding = NamedSharding(make_mesh(MeshConfig(dp=2, ep=4)), PartitionSpec(*spec))
    index = jnp.arange(64, dtype=jnp.int32)

    def draw():
        return random_scores(index, num_experts=E, seed=1, step=jnp.int32(2), layer=jnp.int32(3))

    np.testing.assert_array_equal(jax.jit(draw, out_shardings=sharding)(), jax.jit(draw)())


@pytest.mark.parametrize("name", ["seed", "step", "layer"])
def test_random_experts_differ_with(name):
    same = (np.asarray(random_experts(np.arange(500))) == np.asarray(random_experts(np.arange(500), **{name: 1}))).mean()
    assert abs(same - 1 / E) < 0.05  # as often equal as two independent draws


def test_random_assignment_gives_the_router_no_gradient():
    scores = scores_of(jnp.arange(4), 0, 0, 0)
    grad = jax.grad(lambda x: choose(x, None, top_k=A, gating="softmax", replaced_scores=scores).weights.sum())(logits_of(tokens=4))
    np.testing.assert_array_equal(grad, 0)


def test_bias_rises_below_the_mean_load_and_falls_above():
    bias = jnp.array([[0.5, 0.0, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    counts = jnp.array([[4.0, 0.0, 9.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    np.testing.assert_allclose(update_bias(bias, counts, 0.1), [[0.5, 0.1, -0.6, 0.1], [0, 0, 0, 0]], atol=1e-7)


@pytest.mark.parametrize("normalize", [1.0, 2.0, 16.0])
@pytest.mark.parametrize("weights", [[[0.0, 0.0]], [[1e-38, 0.0]], [[1.0, 1e-30]]])
def test_rescale_stays_finite_where_scores_underflow(normalize, weights):
    def first(w):
        return rescale(w, normalize=normalize, restore_scale=True, scale=1.0)[0, 0]

    value, gradient = jax.value_and_grad(first)(jnp.array(weights, jnp.float32))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("normalize", [1.0, 2.0, 3.0])
def test_gradient_of_rescale_holds_where_one_weight_dwarfs_the_others(normalize):
    """A ratio that rounds to just below 1 must not pass for a token without weights."""
    rng = np.random.default_rng(5)
    top = rng.random((4096, 1)) * 0.9 + 0.05
    weights = np.concatenate([top, top * 10 ** rng.uniform(-12, -0.1, top.shape)], axis=1).astype(np.float32)
    towards = rng.normal(size=weights.shape).astype(np.float32)

    def total(w):
        return (rescale(w, normalize=normalize, restore_scale=False, scale=1.0) * towards).sum()

    gradient = np.asarray(jax.jit(jax.grad(total))(weights), np.float64)
    w = weights.astype(np.float64)
    norm = (w**normalize).sum(axis=1, keepdims=True) ** (1 / normalize)
    exact = towards / norm - (towards * w).sum(axis=1, keepdims=True) * w ** (normalize - 1) / norm ** (normalize + 1)
    error = np.abs(gradient - exact) / np.abs(towards / norm).max(axis=1, keepdims=True)
    assert error.max() < 1e-5
