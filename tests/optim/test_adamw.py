"""AdamW against optax's own over several steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax.config import OptimConfig
from moejax.optim import Group, adamw, init_moments
from moejax.testing import assert_trees_close

CONFIG = OptimConfig(b1=0.8, b2=0.9, eps=1e-3)
GROUPS = {"dense": {"w": Group(1.0, 0.1), "norm": Group(1.0, 0.0)}, "experts": Group(3.0, 0.5)}
SHAPES = {"dense": {"w": (4, 5), "norm": (5,)}, "experts": (2, 3, 4)}


def random_tree(rng):
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), SHAPES, is_leaf=lambda s: isinstance(s, tuple))


@jax.jit
def step(grads, master, moments, lr, updates, is_applied):
    return adamw(CONFIG, GROUPS, grads, master, moments, lr=lr, updates=updates, is_applied=is_applied)


def named(tree):
    return {"w": tree["dense"]["w"], "norm": tree["dense"]["norm"], "experts": tree["experts"]}


def theirs(lr):
    return {
        "w": optax.adamw(lr, 0.8, 0.9, 1e-3, weight_decay=0.1),
        "norm": optax.adamw(lr, 0.8, 0.9, 1e-3, weight_decay=0.0),
        "experts": optax.adamw(3.0 * lr, 0.8, 0.9, 1e-3, weight_decay=0.5),
    }


@jax.jit
def step_of_optax(grads, params, states, lr):
    changes = {name: optimizer.update(grads[name], states[name], params[name]) for name, optimizer in theirs(lr).items()}
    params = {name: params[name] + change for name, (change, _) in changes.items()}
    return params, {name: state for name, (_, state) in changes.items()}


def test_each_group_moves_like_optax_with_its_settings():
    rng = np.random.default_rng(0)
    master = random_tree(rng)
    moments, params = init_moments(master), named(master)
    states = {name: optimizer.init(params[name]) for name, optimizer in theirs(1.0).items()}
    for n in range(5):
        lr, grads = jnp.float32(0.1 / (n + 1)), random_tree(rng)
        master, moments = step(grads, master, moments, lr, jnp.int32(n), jnp.bool_(True))
        params, states = step_of_optax(named(grads), params, states, lr)
        assert_trees_close(named(master), params, "float32", f"step {n}")


def test_bias_correction_counts_applied_updates_alone():
    # Moments of zero and a gradient of one: the corrected direction is 1 / (1 + eps) whatever came before.
    master = jax.tree.map(jnp.zeros_like, random_tree(np.random.default_rng(0)))
    ones = jax.tree.map(jnp.ones_like, master)
    first, moments = step(ones, master, init_moments(master), jnp.float32(1.0), jnp.int32(0), jnp.bool_(True))
    np.testing.assert_allclose(first["dense"]["w"], -1 / 1.001, rtol=1e-6)
    second, _ = step(ones, master, moments, jnp.float32(1.0), jnp.int32(1), jnp.bool_(True))
    np.testing.assert_allclose(second["dense"]["w"], -1 / 1.001, rtol=1e-6)


def test_an_update_that_is_not_applied_changes_nothing_even_if_it_is_not_finite():
    rng = np.random.default_rng(0)
    master = random_tree(rng)
    before = step(random_tree(rng), master, init_moments(master), jnp.float32(0.1), jnp.int32(0), jnp.bool_(True))
    nan = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), master)
    after = step(nan, *before, jnp.float32(0.1), jnp.int32(1), jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_moments_start_at_zero_in_the_masters_shapes():
    moments = init_moments(random_tree(np.random.default_rng(0)))
    assert set(moments) == {"mu", "nu"}
    assert jax.tree.map(jnp.shape, moments["mu"]) == jax.tree.map(jnp.shape, moments["nu"]) == SHAPES
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(moments))
