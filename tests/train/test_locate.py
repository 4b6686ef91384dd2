"""A NaN that is planted somewhere is found there, under expert and data parallelism."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.errors import TrainingError
from moejax.nn.mlp import Experts
from moejax.parallel import make_mesh
from moejax.train.locate import find_non_finite, stop_where_not_finite
from moejax.train.step import put_batch
from tests.oracle.compare import start
from tests.oracle.examples import batch, model_config, parameters, train_config

MODEL = model_config(num_layers=3, num_dense_layers=1, mlp_dim=20, recompute="block", moe={"num_shared_experts": 1, "shared_expert_dim": 8})
CONFIG = train_config(MODEL, dp=2, ep=2, microbatches=2, batch_size=8)


def place(config=CONFIG, change=lambda params: None) -> str:
    params, mesh = parameters(config.model), make_mesh(config.mesh)
    change(params)
    state = start(config, params)
    state = dataclasses.replace(state, step=state.step + 1)  # as it is after the step that failed
    return find_non_finite(config, mesh, state, put_batch(batch(8), config, mesh))


def test_p40_a_weight_is_named_with_layer_and_expert():
    def plant(params):
        params["moe_blocks"]["moe"]["experts"]["w_in"][1, 6, 3] = np.nan

    assert place(change=plant) == "it begins in the weights: moe_blocks.moe.experts.w_in, layer 1, expert 6"


def test_p40_a_result_is_named_with_layer_and_microbatch():
    """Products of large finite weights overflow in the second MoE layer's experts."""

    def plant(params):
        params["moe_blocks"]["moe"]["experts"]["w_in"][1] = 3e38

    assert place(change=plant).startswith("it begins in the forward pass: moe_blocks, layer 1, expert_gate_up, in microbatch 0")


def test_a_result_without_a_name_is_in_the_output_of_its_layer():
    def plant(params):
        params["dense_blocks"]["mlp"]["w_out"][0] = 3e38

    assert place(change=plant).startswith("it begins in the forward pass: dense_blocks, layer 0, output")


def test_a_gradient_alone_is_placed_too():
    whole = Experts.__call__

    @jax.custom_vjp
    def broken(x):
        return x

    broken.defvjp(lambda x: (x, None), lambda _, dy: (dy * jnp.nan,))
    with mock.patch.object(Experts, "__call__", lambda self, *args: broken(whole(self, *args))):
        found = place()
    assert found.startswith("the forward pass is finite; it begins in the backward pass: the gradient of moe_blocks.")
    assert ", layer 1" in found


def test_what_is_finite_now_is_said_to_be():
    assert place().startswith("run again it is finite")


def test_the_step_stops_and_says_where():
    params, mesh = parameters(MODEL), make_mesh(CONFIG.mesh)
    params["embed"]["w_embed"][3] = np.inf
    state, data = start(CONFIG, params), put_batch(batch(8), CONFIG, mesh)

    def failed(state, batch):
        return dataclasses.replace(state, step=state.step + 1), {"optim/finite": jnp.float32(0)}

    with pytest.raises(TrainingError, match=r"step 1: loss or gradient is not finite; it begins in the weights: embed\.w_embed"):
        stop_where_not_finite(failed, CONFIG, mesh)(state, data)


def test_finite_steps_go_on():
    step = stop_where_not_finite(lambda state, batch: (state, {"optim/finite": jnp.float32(1)}), CONFIG, make_mesh(CONFIG.mesh))
    state = start(CONFIG, parameters(MODEL))
    assert step(state, {})[0] is state
