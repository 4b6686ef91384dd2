"""Balance losses, counts and router z-loss from their formulas, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.ops.balance import count_routes, global_balance, instance_balance, local_balance, router_z

B, T, E, A = 3, 8, 4, 2


def local(shares, experts, valid):
    counts = count_routes(experts.reshape(-1, A), valid.reshape(-1), E)
    return local_balance(shares.reshape(-1, E), counts, valid.reshape(-1), A)


def instance(shares, experts, valid):
    return instance_balance(shares, experts, valid)


def whole(shares, experts, valid):
    """The global loss with one device."""
    flat = valid.reshape(-1)
    counts = count_routes(experts.reshape(-1, A), flat, E)
    return global_balance(shares.reshape(-1, E), counts, flat.sum(dtype=jnp.float32), flat, A)


LOSSES = {"local": jax.jit(local), "instance": jax.jit(instance), "global": jax.jit(whole)}
every_loss = pytest.mark.parametrize("kind", LOSSES)


def value(kind, shares, experts, valid=None):
    """The loss per valid token."""
    valid = np.ones((B, T), bool) if valid is None else valid
    loss = LOSSES[kind](jnp.asarray(shares, jnp.float32), jnp.asarray(experts, jnp.int32), jnp.asarray(valid))
    return float(loss) / max(valid.sum(), 1)


def of_group(shares, experts):
    """E * sum_e (fraction of routes to e) * (mean share of e): Fedus et al., equation 4, with fractions of routes."""
    fraction = np.bincount(experts.ravel(), minlength=E) / experts.size
    return E * float(fraction @ shares.reshape(-1, E).mean(axis=0))


def random_case(seed):
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(E), (B, T))
    return shares, np.argsort(-shares, axis=-1)[..., :A]


@every_loss
def test_an_even_load_gives_one(kind):
    experts = np.arange(B * T * A).reshape(B, T, A) % E
    assert value(kind, np.full((B, T, E), 1 / E), experts) == pytest.approx(1, rel=1e-6)


@every_loss
def test_all_tokens_on_the_same_experts_give_the_ratio_of_experts_to_chosen(kind):
    shares = np.broadcast_to([0.5, 0.5, 0, 0], (B, T, E))
    assert value(kind, shares, np.broadcast_to([0, 1], (B, T, A))) == pytest.approx(E / A, rel=1e-6)


@every_loss
def test_loss_grows_with_every_token_that_joins_the_crowd(kind):
    """P36: it must not be constant."""
    shares, experts = np.full((B, T, E), 1 / E), np.arange(B * T * A).reshape(B, T, A) % E
    values = []
    for crowd in range(T + 1):
        shares[:, :crowd], experts[:, :crowd] = [0.5, 0.5, 0, 0], [0, 1]
        values.append(value(kind, shares, experts))
    # Two tokens make one even round, so look two apart.
    assert all(after > before + 1e-3 for before, after in zip(values, values[2:], strict=False))


def test_local_and_instance_losses_are_means_over_their_groups():
    shares, experts = random_case(0)
    assert value("local", shares, experts) == pytest.approx(of_group(shares, experts), rel=1e-6)
    by_sequence = np.mean([of_group(shares[b], experts[b]) for b in range(B)])
    assert value("instance", shares, experts) == pytest.approx(by_sequence, rel=1e-6)
    assert by_sequence > of_group(shares, experts) + 1e-3


def test_parts_of_the_global_loss_add_up_to_the_loss_of_all_devices():
    """P35: the group is the whole microbatch, however it is split."""
    shares, experts = random_case(1)
    valid = np.random.default_rng(2).random((B, T)) < 0.7
    counts = np.bincount(experts[valid].ravel(), minlength=E)
    parts = [
        global_balance(jnp.asarray(s, jnp.float32), jnp.asarray(counts, jnp.float32), jnp.float32(valid.sum()), jnp.asarray(v), A)
        for s, v in zip(shares, valid, strict=True)
    ]
    assert float(sum(parts)) / valid.sum() == pytest.approx(of_group(shares[valid], experts[valid]), rel=1e-6)


@every_loss
def test_padding_has_no_part(kind):
    shares, experts = random_case(3)
    valid = np.zeros((B, T), bool)
    valid[:, :5] = True
    expected = value(kind, shares, experts, valid)
    shares[~valid], experts[~valid] = [1, 0, 0, 0], 0
    assert value(kind, shares, experts, valid) == expected
    groups = [(shares[b, :5], experts[b, :5]) for b in range(B)] if kind == "instance" else [(shares[:, :5], experts[:, :5])]
    assert expected == pytest.approx(np.mean([of_group(*group) for group in groups]), rel=1e-6)


@every_loss
def test_a_group_of_padding_alone_adds_zero_with_a_finite_gradient(kind):
    shares, experts = random_case(4)
    valid = jnp.zeros((B, T), bool)
    loss, grad = jax.value_and_grad(LOSSES[kind])(jnp.asarray(shares, jnp.float32), jnp.asarray(experts, jnp.int32), valid)
    assert float(loss) == 0
    np.testing.assert_array_equal(grad, 0)


@every_loss
def test_gradient_pushes_shares_down_in_proportion_to_the_load(kind):
    shares, experts = random_case(5)
    grad = jax.grad(LOSSES[kind])(jnp.asarray(shares, jnp.float32), jnp.asarray(experts, jnp.int32), jnp.ones((B, T), bool))
    groups = experts if kind == "instance" else experts.reshape(1, -1, A)
    load = np.array([np.bincount(group.ravel(), minlength=E) / group[..., 0].size for group in groups])
    np.testing.assert_allclose(grad, np.broadcast_to(E / A * load[:, None], (B, T, E)), rtol=1e-5)


count = jax.jit(count_routes, static_argnums=2)


@given(st.lists(st.tuples(st.lists(st.integers(0, E - 1), min_size=A, max_size=A, unique=True), st.booleans()), min_size=6, max_size=6))
def test_counts_are_those_of_real_tokens(rows):
    experts, valid = [row for row, _ in rows], [ok for _, ok in rows]
    expected = [sum(e in row for row, ok in rows if ok) for e in range(E)]
    assert count(jnp.array(experts, jnp.int32), jnp.array(valid), E).tolist() == expected


def test_router_z_is_the_sum_of_squared_logsumexp_of_real_tokens():
    logits = np.random.default_rng(6).normal(size=(5, E)) * 4
    logits[3] = 1e4
    valid = np.array([True, True, False, False, True])
    expected = (np.log(np.exp(logits[valid]).sum(axis=1)) ** 2).sum()
    assert float(router_z(jnp.asarray(logits, jnp.float32), jnp.asarray(valid))) == pytest.approx(expected, rel=1e-6)
