"""The stand-alone layer: the dense computation's outputs and gradients on any mesh, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.config import MoEConfig, RouterConfig
from moejax.errors import ConfigError
from moejax.nn import MoELayer
from moejax.testing import assert_scalar_close, assert_trees_close
from tests.nn.dense_moe import dense_moe, plain

DIM, EXPERTS, TOP_K = 12, 8, 2
ROUTER = RouterConfig(balance_loss="global", balance_loss_weight=0.3, z_loss_weight=0.05)
CONFIG = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_dim=10, num_shared_experts=1, shared_expert_dim=6, router=ROUTER)
X = np.random.default_rng(0).normal(size=(2, 3, 5, DIM)).astype(np.float32)
"""Two members of an ensemble of 15 tokens, which 8 devices cannot split evenly."""
VALID = np.random.default_rng(1).random((3, 5)) < 0.8


def mesh_of(kind: str | None):
    if kind is None:
        return None
    name, *sizes = kind.split()
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    return jax.make_mesh(tuple(map(int, sizes)), ("data", "ep"), axis_types=(types[name],) * 2)


def layer_of(kind: str | None, config: MoEConfig = CONFIG) -> MoELayer:
    return MoELayer(DIM, config, mesh=mesh_of(kind), rngs=nnx.Rngs(0), init_std=0.3)


def loss(layer, x, valid):
    y, stats = layer(x, valid=jnp.asarray(valid))
    return (y**2).sum() + stats.aux_loss, stats


@functools.cache
def truth():
    """Loss, statistics and gradients of the dense computation for each member of the ensemble."""
    params = plain(nnx.state(layer_of(None)))["moe"]

    def dense_loss(params, x):
        y, stats = dense_moe(params, x, top_k=TOP_K, valid=VALID)
        return (y**2).sum() + 0.3 * stats["balance_loss"] + 0.05 * stats["z_loss"], stats

    with jax.default_matmul_precision("highest"):
        return [jax.jit(jax.value_and_grad(dense_loss, has_aux=True))(params, x) for x in X]


def check(member: int, value, stats, grads) -> None:
    (expected, expected_stats), expected_grads = truth()[member]
    assert_scalar_close(value, expected, "float32", "loss")
    np.testing.assert_array_equal(stats.counts, expected_stats["counts"])
    assert_scalar_close(stats.balance_loss, expected_stats["balance_loss"], "float32", "balance loss")
    assert_scalar_close(stats.z_loss, expected_stats["z_loss"], "float32", "z-loss")
    assert stats.drop_fraction == 0
    assert_trees_close(grads, expected_grads, "float32", "gradients")


@pytest.mark.slow  # tests/test_readme.py has a mesh of 2 x 4 in the default run
@pytest.mark.parametrize("kind", [None, "auto 1 1", "auto 1 8", "explicit 1 4"])
def test_loss_statistics_and_gradients_equal_the_dense_computation(kind):
    (value, stats), grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer_of(kind), X[0], VALID)
    check(0, value, stats, plain(grads)["moe"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "auto 2 4", "explicit 2 4"])
def test_p39_vmap_over_an_ensemble_with_checkpoint_equals_the_dense_computation_of_each(kind):
    graph, state = nnx.split(layer_of(kind))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def run(state, x):
        return jax.value_and_grad(jax.checkpoint(lambda state: loss(nnx.merge(graph, state), x, VALID)), has_aux=True)(state)

    (values, stats), grads = run(state, X)
    for member in range(2):
        check(member, *jax.tree.map(lambda leaf, m=member: np.asarray(leaf)[m], (values, stats, plain(grads)["moe"])))


def test_parameters_are_the_same_on_any_mesh_and_lie_where_flax_says():
    alone, spread = layer_of(None), layer_of("auto 2 4")
    jax.tree.map(np.testing.assert_array_equal, plain(nnx.state(alone)), plain(nnx.state(spread)))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(spread, nnx.Param)))["moe"]
    assert specs["experts"] == {"w_in": P("ep", None, None, None), "w_out": P("ep", None, None)}
    assert specs["router"] == {"w_router": P(None, None)}
    w_in = spread.moe.experts.w_in[...]
    assert (w_in.sharding.spec, w_in.addressable_shards[0].data.shape) == (specs["experts"]["w_in"], (2, DIM, 2, 10))


@pytest.mark.slow
def test_a_scan_over_stacked_layers_equals_one_after_the_other():
    mesh = mesh_of("auto 2 4")
    layers = [MoELayer(DIM, CONFIG, mesh=mesh, rngs=nnx.Rngs(seed), init_std=0.3) for seed in range(2)]
    graph, _ = nnx.split(layers[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(layer) for layer in layers))

    def scanned(stacked, x):
        return jax.lax.scan(lambda x, state: (x + nnx.merge(graph, state)(x)[0], None), x, stacked)[0]

    def unrolled(layers, x):
        for layer in layers:
            x = x + layer(x)[0]
        return x

    np.testing.assert_allclose(jax.jit(scanned)(stacked, X[0]), nnx.jit(unrolled)(layers, X[0]), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_capacity_drops_and_dropless_does_not():
    config = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_dim=10, capacity_factor=0.5)
    layer = layer_of("auto 2 4", config)
    run = nnx.jit(lambda layer, x, dropless: layer(x, dropless=dropless)[1], static_argnums=2)
    assert run(layer, X[0], False).drop_fraction > 0.2
    assert run(layer, X[0], True).drop_fraction == 0


@pytest.mark.slow
def test_the_input_sets_the_compute_dtype_and_router_and_statistics_stay_float32():
    layer = layer_of("auto 2 4")
    run = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    (value, stats), grads = run(layer, jnp.asarray(X[0], "bfloat16"), VALID)
    assert jax.eval_shape(lambda layer, x: layer(x)[0], layer, jnp.asarray(X[0], "bfloat16")).dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((stats, grads)))
    (expected, _), expected_grads = truth()[0]
    assert float(value) == pytest.approx(float(expected), rel=0.02)
    w_out = grads.moe.shared.w_out[...]
    np.testing.assert_allclose(w_out, expected_grads["shared"]["w_out"], atol=0.05 * np.abs(w_out).max())


def test_the_bias_is_state_and_moves_against_the_counts():
    config = MoEConfig(num_experts=4, top_k=1, expert_dim=2, router=RouterConfig(bias_update_rate=0.5))
    layer = layer_of(None, config)
    layer.update_bias(jnp.array([3.0, 1.0, 2.0, 2.0]))
    np.testing.assert_array_equal(layer.bias[...], [-0.5, 0.5, 0, 0])
    assert not any("bias" in path for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param)))
    with pytest.raises(ConfigError, match=r"model\.moe\.router\.bias_update_rate=None leaves nothing to update; give a rate"):
        layer_of(None).update_bias(jnp.zeros(EXPERTS))


@pytest.mark.slow
def test_the_bias_chooses_experts():
    config = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, expert_dim=10, router=RouterConfig(bias_update_rate=100.0))
    layer = layer_of("auto 2 4", config)
    layer.update_bias(jnp.where(jnp.arange(EXPERTS) < 2, 0.0, 1.0))
    counts = nnx.jit(lambda layer, x: layer(x)[1].counts)(layer, X[0])
    np.testing.assert_array_equal(counts, [15, 15, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"assignment": "random"}, r"model.moe.router.assignment=random draws anew in each step.*; use learned or uniform"),
        ({"balance_loss": "instance"}, r"model.moe.router.balance_loss=instance needs whole sequences.*; use local or global"),
    ],
)
def test_settings_that_need_more_than_tokens_are_refused(router, message):
    with pytest.raises(ConfigError, match=message):
        layer_of(None, MoEConfig(num_experts=4, top_k=1, expert_dim=2, router=RouterConfig(**router)))


@pytest.mark.parametrize(
    ("x", "valid", "message"),
    [
        (jnp.ones((4, 5)), None, r"x is float32\[4, 5\]; give floating-point tokens of width 8"),
        (jnp.ones((0, 8)), None, r"x is float32\[0, 8\]; give floating-point tokens of width 8, one at least"),
        (jnp.ones((4, 8), jnp.int32), None, r"x is int32\[4, 8\]; give floating-point"),
        (jnp.ones((2, 4, 8)), jnp.ones((1, 4), bool), r"valid is bool\[1, 4\]; give bool\[2, 4\]"),
        (jnp.ones((4, 8)), jnp.ones(4, jnp.int32), r"valid is int32\[4\]; give bool\[4\]"),
    ],
)
def test_input_that_does_not_fit_is_refused(x, valid, message):
    layer = MoELayer(8, MoEConfig(num_experts=2, top_k=1, expert_dim=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        layer._check_input(x, valid)


def test_a_mesh_that_cannot_split_the_experts_is_refused():
    with pytest.raises(ConfigError, match=r"the mesh has axes x, and experts are split over an axis named ep; add it"):
        MoELayer(DIM, CONFIG, mesh=jax.make_mesh((8,), ("x",)), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"mesh axis ep=3 does not divide model\.moe\.num_experts=8"):
        MoELayer(DIM, CONFIG, mesh=jax.make_mesh((3,), ("ep",)), rngs=nnx.Rngs(0))
