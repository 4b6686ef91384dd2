"""Run moejax's gradient function on a mesh, and hold it against the oracle."""

import functools
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import TrainConfig
from moejax.parallel import make_mesh, rules
from moejax.testing import assert_scalar_close, assert_trees_close, named_leaves
from moejax.train.durable import abstract_durable, from_durable
from moejax.train.state import TrainState
from moejax.train.step import make_grad_fn, make_train_step, put_batch
from tests.oracle.layout import Layout
from tests.oracle.losses import StepOracle, nest, step_oracle

MIN_MARGIN = 1e-5
"""Router scores relatively closer than this might be ordered differently in float32 and float64; a case must not hold such a pair."""


MESHES = ((1, 1), (2, 1), (1, 2), (2, 4), (1, 8))
"""(dp, ep) of every parity test."""


class Result(NamedTuple):
    gradients: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]


def sharding_small_leaves():
    """Within this, leaves above 256 bytes count as large: the weights of test models are sharded, their norm scales are not."""
    return mock.patch.object(rules, "_SMALL_BYTES", 256)


@functools.lru_cache(maxsize=64)
def compiled(config: TrainConfig):
    """The mesh and the jitted gradient function of a config, compiled once per test process and batch shape."""
    mesh = make_mesh(config.mesh)
    with sharding_small_leaves():
        return mesh, make_grad_fn(config, mesh)


@functools.lru_cache(maxsize=64)
def compiled_step(config: TrainConfig):
    """The mesh and the jitted step."""
    mesh = make_mesh(config.mesh)
    with sharding_small_leaves():
        return mesh, make_train_step(config, mesh)


def start(config: TrainConfig, params: dict) -> TrainState:
    """The state before training, but with these parameters as masters."""
    mesh = make_mesh(config.mesh)
    with sharding_small_leaves():
        empty = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), abstract_durable(config, mesh))
        master = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, empty["master"])
        return from_durable(config, mesh, empty | {"master": master})


def cast(params: dict, config: TrainConfig) -> dict:
    """Parameters in the compute dtype; norm scales and routers stay float32."""
    flat = named_leaves(params)
    leaves = [jnp.asarray(v, "float32" if n.endswith(("scale", "w_router")) else config.model.dtype) for n, v in flat.items()]
    return nest(flat, leaves)


def gradients(config: TrainConfig, params: dict, batch: dict, bias: np.ndarray | None = None, step: int = 0) -> Result:
    """moejax's gradients by dotted name, and its metrics."""
    mesh, grad_fn = compiled(config)
    router = {}
    if config.model.moe is not None:
        shape = (config.model.num_moe_layers, config.model.moe.num_experts)
        router = {"bias": np.zeros(shape, np.float32) if bias is None else np.asarray(bias, np.float32)}
    grads, metrics = grad_fn(cast(params, config), router, jnp.int32(step), put_batch(batch, config, mesh))
    return Result(named_leaves(grads), {name: np.asarray(value) for name, value in metrics.items()})


def layout_of(config: TrainConfig) -> Layout:
    return Layout(config.mesh.dp, config.mesh.ep, config.microbatches)


def oracle_of(config: TrainConfig, params: dict, batch: dict, bias: np.ndarray | None = None, *, ties: bool = False) -> StepOracle:
    """The oracle's account of the same step, with parameters rounded to the compute dtype."""
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.float32)), cast(params, config))
    truth = step_oracle(rounded, bias, batch, config.model, layout_of(config))
    assert ties or truth.margin > MIN_MARGIN, f"the case holds a near-tie of router scores ({truth.margin:.1e}); choose another seed"
    return truth


def assert_step_equals(config: TrainConfig, result: Result, truth: StepOracle) -> None:
    """Losses, counts, drops and every gradient."""
    dtype, metrics = config.model.dtype, result.metrics
    what = f"dp={config.mesh.dp} ep={config.mesh.ep} microbatches={config.microbatches}"
    assert_scalar_close(metrics["train/loss"], truth.ce, dtype, f"{what}: train/loss")
    assert_scalar_close(metrics["train/z_loss"], truth.z_loss, dtype, f"{what}: train/z_loss")
    if config.model.moe is not None:
        assert_scalar_close(metrics["moe/balance_loss"], truth.balance.mean(), dtype, f"{what}: moe/balance_loss")
        assert_scalar_close(metrics["moe/router_z_loss"], truth.router_z.mean(), dtype, f"{what}: moe/router_z_loss")
        assert_scalar_close(metrics["moe/buffer_demand"], truth.demand, dtype, f"{what}: moe/buffer_demand")
        by_rank = truth.counts.reshape(len(truth.counts), config.mesh.ep, -1).sum(axis=2)
        for name, load in (("moe/max_load", truth.counts), ("moe/rank_max_load", by_rank)):
            assert_scalar_close(metrics[name], (load.max(axis=1) / load.mean(axis=1)).max(), dtype, f"{what}: {name}")
        routes = truth.counts.sum(axis=1)
        np.testing.assert_allclose(
            metrics["moe/expert_load"], truth.counts / routes[:, None], rtol=1e-6, err_msg=f"{what}: moe/expert_load"
        )
        np.testing.assert_allclose(metrics["moe/layer_drop"], truth.dropped / routes, rtol=1e-6, err_msg=f"{what}: moe/layer_drop")
        np.testing.assert_allclose(metrics["moe/drop_fraction"], truth.dropped.sum() / routes.sum(), rtol=1e-6, err_msg=f"{what}: drops")
    assert_trees_close(result.gradients, truth.gradients, dtype, f"{what}: gradients")


def check(
    config: TrainConfig, params: dict, batch: dict, bias: np.ndarray | None = None, *, ties: bool = False
) -> tuple[Result, StepOracle]:
    """Run both and compare; returns both for further questions."""
    truth = oracle_of(config, params, batch, bias, ties=ties)
    result = gradients(config, params, batch, bias)
    assert_step_equals(config, result, truth)
    return result, truth


def mesh_id(mesh: tuple[int, int]) -> str:
    return f"dp{mesh[0]}_ep{mesh[1]}"
