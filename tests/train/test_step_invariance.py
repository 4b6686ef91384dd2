"""What a step must not change with microbatches, pp, dp or ep, each cell of the table a test; and three whole steps against the oracle.

The step is compiled once per layout. A large eps keeps AdamW smooth, so that rounding stays rounding.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.config import MeshConfig, TrainConfig
from moejax.testing import assert_scalar_close, assert_trees_close, named_leaves
from moejax.train.step import put_batch
from tests.oracle import Optimizer, flatten
from tests.oracle.compare import compiled_step, oracle_of, start
from tests.oracle.examples import batch, model_config, parameters, train_config
from tests.oracle.losses import nest

MODEL = model_config(
    norm_placement="peri",
    z_loss_weight=0.02,
    attention={"qk_norm": "head"},
    moe={"num_shared_experts": 1, "shared_expert_dim": 10},
    router={
        "gating": "sigmoid",
        "restore_scale": True,
        "balance_loss": "instance",
        "balance_loss_weight": 0.3,
        "z_loss_weight": 0.05,
        "bias_update_rate": 0.01,
    },
)
OPTIM = {
    "lr": 0.01,
    "eps": 1e-3,
    "weight_decay": 0.3,
    "max_grad_norm": 1.0,
    "expert_lr_scale": 0.5,
    "expert_weight_decay": 0.2,
    "no_decay": ("embed.*", "*norm*"),
}
STEPS = 3


def run(dp: int, ep: int, microbatches: int, **model) -> TrainConfig:
    return train_config(dataclasses.replace(MODEL, **model), dp=dp, ep=ep, microbatches=microbatches, optim=OPTIM)


LAYOUTS = {
    "microbatches": run(1, 1, 4, recompute="block"),
    "pp": dataclasses.replace(run(1, 1, 1), mesh=MeshConfig(pp=2)),
    "dp": run(8, 1, 1),
    "ep": run(1, 8, 1),
    "all": run(2, 4, 2),
}
"""Each changes one thing against ONE, the last everything. Recomputing blocks is no part of the result either."""
ONE = run(1, 1, 1)
NAMES = ("microbatches", "dp", "ep", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pp", "all")))
each_layout = pytest.mark.parametrize("changed", NAMES)


def data(step: int):
    return batch(documents=True, padding=True, seed=10 + step)


@dataclasses.dataclass
class Steps:
    """What a run of STEPS steps reported after each of them."""

    metrics: list[dict[str, np.ndarray]]
    bias: list[np.ndarray]
    mu: list[dict[str, np.ndarray]]
    master: list[dict[str, np.ndarray]]


@functools.lru_cache
def train(config: TrainConfig) -> Steps:
    mesh, step = compiled_step(config)
    state, seen = start(config, parameters(MODEL)), Steps([], [], [], [])
    for number in range(STEPS):
        state, metrics = step(state, put_batch(data(number), config, mesh))
        seen.metrics.append(jax.device_get(metrics))
        seen.bias.append(np.asarray(state.router["bias"]))
        seen.mu.append(named_leaves(state.moments["mu"]))
        seen.master.append(named_leaves(state.master))
    return seen


@functools.lru_cache
def truth(config: TrainConfig):
    """The same steps by the oracle: what each reports, the bias after it, and the optimizer at the end."""
    params, bias = parameters(MODEL), np.zeros((2, 8))
    optimizer = Optimizer(config.optim, config.steps, flatten(params))
    steps, biases, mu, master = [], [], [], []
    for number in range(STEPS):
        step = oracle_of(config, nest(optimizer.master, optimizer.master.values()), data(number), bias)
        assert optimizer.apply(step.gradients, step.ce)
        bias = bias + config.model.moe.router.bias_update_rate * np.sign(step.counts.mean(axis=1, keepdims=True) - step.counts)
        steps.append(step)
        biases.append(bias)
        mu.append(dict(optimizer.mu))
        master.append(dict(optimizer.master))
    return steps, biases, mu, master


def assert_same(name: str, changed: str, rtol: float = 2e-6) -> None:
    one, other = train(ONE).metrics[0][name], train(LAYOUTS[changed]).metrics[0][name]
    np.testing.assert_allclose(other, one, rtol=rtol, err_msg=f"{name} changes with {changed}")


@each_layout
def test_cross_entropy_is_invariant(changed):
    assert_same("train/loss", changed)


@each_layout
def test_head_z_loss_is_invariant(changed):
    assert_same("train/z_loss", changed)


@each_layout
def test_router_z_loss_is_invariant(changed):
    assert_same("moe/router_z_loss", changed)


@each_layout
def test_instance_balance_loss_is_invariant(changed):
    assert_same("moe/balance_loss", changed)


@each_layout
def test_load_counts_are_invariant(changed):
    assert_same("moe/expert_load", changed, rtol=1e-7)
    assert_same("train/tokens", changed, rtol=0)


@each_layout
def test_p44_bias_update_is_invariant(changed):
    assert np.abs(train(ONE).bias[0]).max() == pytest.approx(0.01)
    np.testing.assert_array_equal(train(LAYOUTS[changed]).bias[0], train(ONE).bias[0])


@each_layout
def test_p37_gradients_and_their_norm_are_invariant(changed):
    assert_same("optim/grad_norm", changed)
    assert_trees_close(train(LAYOUTS[changed]).mu[0], train(ONE).mu[0], "float32", f"first moments, {changed}")


@pytest.mark.parametrize("layout", ["one", *NAMES])
def test_three_steps_equal_the_oracle(layout):
    """Losses, bias, clipped gradients (as first moments), parameter groups and masters, step after step."""
    config = ONE if layout == "one" else LAYOUTS[layout]
    seen, (steps, biases, mu, master) = train(config), truth(config)
    for number, step in enumerate(steps):
        metrics = seen.metrics[number]
        assert_scalar_close(metrics["train/loss"], step.ce, "float32", f"loss of step {number}")
        assert_scalar_close(metrics["train/z_loss"], step.z_loss, "float32", f"z-loss of step {number}")
        assert_scalar_close(metrics["moe/balance_loss"], step.balance.mean(), "float32", f"balance loss of step {number}")
        np.testing.assert_allclose(seen.bias[number], biases[number], atol=1e-7)
        assert_trees_close(seen.mu[number], mu[number], "float32", f"first moments after step {number}")
        assert_trees_close(seen.master[number], master[number], "float32", f"masters after step {number}")
        assert metrics["optim/skipped"] == 0


def test_the_gradient_is_clipped_in_these_steps():
    assert train(ONE).metrics[0]["optim/grad_norm"] > 1.5 * OPTIM["max_grad_norm"]


def test_p26_router_gradient_does_not_grow_with_the_number_of_microbatches():
    name = "moe_blocks.moe.router.w_router"
    one, four = train(ONE).mu[0][name], train(LAYOUTS["microbatches"]).mu[0][name]
    np.testing.assert_allclose(four, one, atol=1e-5 * np.abs(one).max())


def test_p29_bias_moves_once_a_step_and_recomputed_tokens_count_once():
    """Four microbatches with every block recomputed, against one microbatch and no recomputation."""
    np.testing.assert_array_equal(train(LAYOUTS["microbatches"]).bias, train(ONE).bias)
    assert set(np.unique(np.round(train(ONE).bias[0] / 0.01))) <= {-1, 0, 1}
    steps, _, _, _ = truth(LAYOUTS["microbatches"])
    real = (data(0)["segment_ids"] != 0).sum()
    assert steps[0].counts.sum(axis=1).tolist() == [2 * real, 2 * real]


def test_a_step_without_a_finite_loss_changes_nothing_but_the_step_number():
    params = parameters(MODEL)
    params["head"]["norm"]["scale"][3] = np.inf
    mesh, step = compiled_step(ONE)
    before = jax.device_get(start(ONE, params))
    after, metrics = step(start(ONE, params), put_batch(data(0), ONE, mesh))
    assert not np.isfinite(metrics["train/loss"])
    assert (metrics["optim/finite"], metrics["optim/skipped"]) == (0, 1)
    for field in ("params", "master", "moments", "router", "history", "updates"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(after, field)), getattr(before, field))
    assert (before.step, after.step) == (0, 1)
