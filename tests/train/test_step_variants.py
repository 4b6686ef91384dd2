"""Cases at the edge of the step: one token, all experts chosen, bfloat16, fixed routes, ties under recomputation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.testing import TOLERANCES
from tests.oracle.compare import check, gradients, oracle_of
from tests.oracle.examples import batch, model_config, parameters, train_config


def test_every_expert_is_chosen_by_every_token():
    """top_k = num_experts leaves nothing to choose and nothing to balance."""
    model = model_config(
        moe={"num_experts": 4, "top_k": 4}, router={"normalize": None, "scale": 2.0, "balance_loss": "local", "balance_loss_weight": 0.5}
    )
    result, truth = check(train_config(model, dp=1, ep=2), parameters(model), batch(padding=True))
    np.testing.assert_allclose(truth.balance, 1.0, rtol=1e-12)
    np.testing.assert_allclose(result.metrics["moe/expert_load"], 0.25, rtol=1e-6)


@pytest.mark.parametrize("crowded", [False, True])
def test_p15_one_token_a_rank_sixty_four_experts_one_route(crowded):
    """One token per rank, k = 1; crowded sends all eight to expert 0, so that seven ranks compute nothing."""
    model = model_config(moe={"num_experts": 64, "top_k": 1}, router={"normalize": None, "balance_loss_weight": 0.3, "z_loss_weight": 0.05})
    bias = np.zeros((2, 64))
    bias[:, 0] = 100 * crowded
    _, truth = check(train_config(model, dp=1, ep=8, batch_size=8, seq_len=1), parameters(model), batch(8, 1, seed=1), bias)
    assert (truth.counts[:, 0] == 8).all() == crowded


def test_bfloat16_with_uniform_routes_equals_the_oracle_within_its_tolerance():
    """Routes are fixed, so that rounding cannot choose other experts. Parameters of the oracle are rounded the same way."""
    model = model_config(
        dtype="bfloat16",
        norm_placement="peri",
        moe={"num_shared_experts": 1, "shared_expert_dim": 10},
        router={"assignment": "uniform", "z_loss_weight": 0.05},
    )
    result, truth = check(train_config(model, dp=1, ep=2, microbatches=2), parameters(model), batch(documents=True, seed=3))
    assert (truth.counts == 20).all()
    assert all(value.dtype == np.float32 for value in result.gradients.values())


MODEL = model_config(router={"balance_loss_weight": 0.3})


def test_p32_ties_choose_the_same_experts_when_blocks_are_recomputed():
    """Constant router logits: a recomputation that broke ties otherwise would silently corrupt the gradients.

    The compiler fuses the two programs differently, so their gradients agree to rounding, and each program's to the bit.
    """
    params = parameters(MODEL)
    params["moe_blocks"]["moe"]["router"]["w_router"] *= 0
    config = train_config(dataclasses.replace(MODEL, recompute="block"), dp=1, ep=2)
    recomputed, truth = check(config, params, batch(), ties=True)
    kept, _ = check(train_config(MODEL, dp=1, ep=2), params, batch(), ties=True)
    assert truth.counts[0].tolist() == [80, 80, 0, 0, 0, 0, 0, 0]
    again = gradients(config, params, batch())
    for name, value in recomputed.gradients.items():
        np.testing.assert_array_equal(again.gradients[name], value, err_msg=name)
        np.testing.assert_array_equal(value == 0, kept.gradients[name] == 0, err_msg=f"{name}: zeros, so those of experts not chosen")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "block"])
def test_bfloat16_with_learned_routes_stays_near_the_oracle(mode):
    model = dataclasses.replace(MODEL, dtype="bfloat16", recompute=mode)
    config = train_config(model, dp=2, ep=2)
    truth = oracle_of(config, parameters(model), batch())
    loss = gradients(config, parameters(model), batch()).metrics["train/loss"]
    assert loss == pytest.approx(truth.ce, rel=10 * TOLERANCES["bfloat16"].scalar)
    assert loss.dtype == jnp.float32
