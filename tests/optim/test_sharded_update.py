"""Reduce, measure, clip, step and gather on eight devices equal optax on one, for every kind of layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import MeshConfig, OptimConfig
from moejax.optim import Group, adamw, init_moments
from moejax.parallel import AXES, make_mesh, zero
from moejax.parallel.rules import Rule, make_rule
from moejax.testing import assert_scalar_close, assert_trees_close

LEAVES = {  # shape, logical axes, PartitionSpec of the state on dp=2, ep=4
    "by_layer": ((8, 64, 32), ("layer", "embed", "mlp"), P(("dp", "ep"), None, None)),
    "by_other_dim": ((3, 7, 1024), ("layer", "heads", "embed"), P(None, None, ("dp", "ep"))),
    "by_no_dim": ((3, 7, 1001), ("layer", "heads", "embed"), P(None, None, None)),
    "small": ((16, 8), ("layer", "norm"), P(None, None)),
    "scalar_like": ((1,), ("norm",), P(None)),
    "experts_by_layer": ((2, 4, 64, 128), ("layer", "expert", "embed", "mlp"), P("dp", "ep", None, None)),
    "experts_by_expert": ((3, 8, 48, 64), ("layer", "expert", "embed", "mlp"), P(None, ("ep", "dp"), None, None)),
    "experts_by_other_dim": ((3, 4, 64, 96), ("layer", "expert", "embed", "mlp"), P(None, "ep", "dp", None)),
    "experts_small": ((2, 4, 5, 7), ("layer", "expert", "embed", "mlp"), P(None, "ep", None, None)),
}
EXPERTS = [name for name in LEAVES if name.startswith("experts")]
DTYPES = {name: jnp.dtype("bfloat16" if name.startswith("experts") or name == "by_other_dim" else "float32") for name in LEAVES}
GROUPS = {name: Group(1.0, 0.0 if name == "small" else 0.1) for name in LEAVES}
CONFIG, LR, STEPS = OptimConfig(), 0.01, 3
OPTAX = optax.adamw(LR, CONFIG.b1, CONFIG.b2, CONFIG.eps, weight_decay=0.1, mask={name: name != "small" for name in LEAVES})


@jax.jit
def step_of_optax(grads, memory, params):
    change, memory = OPTAX.update(grads, memory, params)
    return optax.apply_updates(params, change), memory


def rules_on(mesh):
    return {name: make_rule(shape, axes, dict(mesh.shape)) for name, (shape, axes, _) in LEAVES.items()}


def trees(rules, mesh):
    """Shardings of state, parameters, and per-device gradients: one a device for dense leaves, one a dp group for experts."""
    state = {name: rule.state for name, rule in rules.items()}
    params = {name: rule.param for name, rule in rules.items()}
    grads = {name: P("dp" if name in EXPERTS else ("dp", "ep"), *rule.param) for name, rule in rules.items()}
    return state, params, grads


def sharded_step(mesh, max_norm):
    rules = rules_on(mesh)
    state, params, grads = trees(rules, mesh)

    def step(grads, master, moments, updates):
        grads = zero.reduce_gradients({name: grad[0] for name, grad in grads.items()}, rules)
        norm = zero.global_norm(grads, rules, AXES)
        scale = zero.clip_scale(norm, max_norm)
        scaled = {name: grad * scale for name, grad in grads.items()}
        master, moments = adamw(CONFIG, GROUPS, scaled, master, moments, lr=jnp.float32(LR), updates=updates, is_applied=jnp.bool_(True))
        return grads, norm, master, moments, zero.gather_parameters(master, rules, DTYPES)

    moments = {"mu": state, "nu": state}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(grads, state, moments, P()), out_specs=(state, P(), state, moments, params), check_vma=False
    )
    return jax.jit(mapped)


def place(mesh, specs, tree):
    return {name: jax.device_put(value, NamedSharding(mesh, specs[name])) for name, value in tree.items()}


def random_gradients(rng, mesh):
    dp, ep = mesh.shape["dp"], mesh.shape["ep"]
    return {name: rng.normal(size=(dp if name in EXPERTS else dp * ep, *shape)).astype("f") for name, (shape, _, _) in LEAVES.items()}


def global_norm(tree):
    return np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in tree.values()))


@pytest.mark.parametrize(("shape", "max_norm"), [((1, 1), 1.0), ((2, 4), 1.0), ((8, 1), None)], ids=str)
def test_three_steps_equal_optax_on_whole_arrays(shape, max_norm):
    mesh, rng = make_mesh(MeshConfig(dp=shape[0], ep=shape[1])), np.random.default_rng(0)
    state, _, gradient_specs = trees(rules_on(mesh), mesh)
    whole = {name: rng.normal(size=shape).astype("f") for name, (shape, _, _) in LEAVES.items()}
    master = place(mesh, state, whole)
    moments = init_moments(master)
    step = sharded_step(mesh, max_norm)
    memory = OPTAX.init(whole)
    for n in range(STEPS):
        parts = random_gradients(rng, mesh)
        reduced, norm, master, moments, params = step(place(mesh, gradient_specs, parts), master, moments, jnp.int32(n))
        truth = {name: part.sum(axis=0, dtype=np.float64) for name, part in parts.items()}
        assert_trees_close(reduced, truth, "float32", "reduced gradients")
        assert_scalar_close(norm, global_norm(truth), "float32", "norm")
        scale = 1.0 if max_norm is None else min(1.0, max_norm / global_norm(truth))
        whole, memory = step_of_optax({name: (grad * scale).astype("f") for name, grad in truth.items()}, memory, whole)
        assert_trees_close(master, whole, "float32", f"masters after step {n}")
    for name, value in params.items():
        assert value.dtype == DTYPES[name]
        np.testing.assert_array_equal(value, np.asarray(master[name]).astype(DTYPES[name]), err_msg=name)
        assert_copies_are_equal(value)
        assert_copies_are_equal(master[name])


def assert_copies_are_equal(array):
    """Devices that hold the same part hold the same bits."""
    parts = {}
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, parts.setdefault(str(shard.index), shard.data))


def test_each_leaf_is_laid_out_as_written():
    rules = rules_on(make_mesh(MeshConfig(dp=2, ep=4)))
    assert {name: rule.state for name, rule in rules.items()} == {name: spec for name, (_, _, spec) in LEAVES.items()}


@pytest.mark.parametrize(("norm", "max_norm", "expected"), [(0.0, 1.0, 1.0), (0.99, 1.0, 1.0), (4.0, 1.0, 0.25), (50.0, None, 1.0)])
def test_the_clip_factor(norm, max_norm, expected):
    assert float(zero.clip_scale(jnp.float32(norm), max_norm)) == pytest.approx(expected, rel=1e-6)


def test_a_leaf_that_lives_on_several_devices_counts_once_in_the_norm():
    rule = Rule(axes=("dp", "ep"), dim=None, param=P(None), state=P(None), copies=8)
    mesh = make_mesh(MeshConfig(dp=2, ep=4))
    norm = jax.shard_map(
        lambda g: zero.global_norm({"a": g}, {"a": rule}, AXES), mesh=mesh, in_specs=P(None), out_specs=P(), check_vma=False
    )
    assert float(jax.jit(norm)(jnp.array([3.0, 4.0]))) == pytest.approx(5.0)
