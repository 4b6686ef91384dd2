"""Dropless expert parallelism: losses, counts and every gradient equal the float64 oracle, whatever the routing and the mesh.

One model, compiled once per mesh; what changes is the routing.
"""

import numpy as np
import pytest

from tests.oracle.compare import MESHES, check, gradients, mesh_id, oracle_of
from tests.oracle.examples import batch, model_config, parameters, train_config

MODEL = model_config(router={"balance_loss_weight": 0.3, "z_loss_weight": 0.05}, z_loss_weight=0.02)
"""Softmax router, top-2 of 8, local balance loss."""

on_every_mesh = pytest.mark.parametrize(
    "mesh", [mesh if mesh in ((1, 1), (2, 4)) else pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES], ids=mesh_id
)


def run_on(mesh):
    """Two microbatches of 8 sequences of 5 tokens: an odd length, and one sequence per rank on 8 devices."""
    return train_config(MODEL, dp=mesh[0], ep=mesh[1], microbatches=2)


def prefer(*experts: int) -> np.ndarray:
    """A selection bias that sends every token to these experts, in both layers."""
    bias = np.zeros((2, 8))
    bias[:, list(experts)] = 100.0 - np.arange(len(experts))
    return bias


def without_router(params: dict) -> dict:
    """Parameters with constant router logits, so that all experts tie."""
    params["moe_blocks"]["moe"]["router"]["w_router"] = np.zeros_like(params["moe_blocks"]["moe"]["router"]["w_router"])
    return params


@on_every_mesh
def test_losses_and_gradients_equal_the_oracle(mesh):
    result, truth = check(run_on(mesh), parameters(MODEL), batch(documents=True, padding=True, seed=2))
    assert all(np.abs(gradient).max() > 0 for gradient in truth.gradients.values())
    assert result.metrics["moe/drop_fraction"] == 0


@on_every_mesh
def test_experts_without_tokens(mesh):
    """Three experts of eight are ever chosen; the others' gradients are exactly zero."""
    bias = np.zeros((2, 8))
    bias[:, [0, 1, 3, 4, 7]] = -100
    result, truth = check(run_on(mesh), parameters(MODEL), batch(), bias)
    assert (truth.counts[:, [2, 5, 6]] > 0).all()
    assert not result.gradients["moe_blocks.moe.experts.w_in"][:, [0, 1, 3, 4, 7]].any()


@on_every_mesh
def test_every_token_on_the_same_experts(mesh):
    _, truth = check(run_on(mesh), parameters(MODEL), batch(), prefer(4, 3))
    assert truth.counts[0].tolist() == [0, 0, 0, 80, 80, 0, 0, 0]


@on_every_mesh
def test_ties_between_all_experts_go_to_the_lowest(mesh):
    _, truth = check(run_on(mesh), without_router(parameters(MODEL)), batch(), ties=True)
    assert truth.counts[0].tolist() == [80, 80, 0, 0, 0, 0, 0, 0]


@on_every_mesh
def test_ranks_that_hold_only_padding(mesh):
    """All rows of the first microbatch but one, and half of the second, are padding."""
    data = batch(seed=3)
    empty = np.r_[0:3, 4:12]
    data["segment_ids"][empty] = 0
    data["labels"][empty] = -1
    check(run_on(mesh), parameters(MODEL), data)


@on_every_mesh
def test_one_token_in_the_whole_batch(mesh):
    data = batch()
    data["segment_ids"][:] = 0
    data["labels"][:] = -1
    data["segment_ids"][9, 0] = 1
    data["labels"][9, 0] = 7
    _, truth = check(run_on(mesh), parameters(MODEL), data)
    assert truth.counts.sum() == 4


@on_every_mesh
def test_p06_gradients_of_empty_experts_do_not_remember_the_step_before(mesh):
    config, params, data = run_on(mesh), parameters(MODEL), batch()
    first = gradients(config, params, data, prefer(2, 6))
    gradients(config, parameters(MODEL, seed=1), data)  # every expert is used, with other values
    again = gradients(config, params, data, prefer(2, 6))
    for name, value in first.gradients.items():
        np.testing.assert_array_equal(again.gradients[name], value, err_msg=name)


@pytest.mark.parametrize("mesh", [(2, 4)], ids=mesh_id)
def test_p09_ranks_whose_experts_get_no_token_still_take_part(mesh):
    """Experts 0 and 1 live on rank 0 of each ep group; the other ranks have nothing to compute."""
    result, truth = check(run_on(mesh), parameters(MODEL), batch(), prefer(0, 1))
    assert np.isfinite(result.metrics["train/loss"])
    assert truth.counts[:, 2:].sum() == 0


@on_every_mesh
def test_p10_an_expert_used_in_one_microbatch_only_keeps_its_gradient(mesh):
    """Tokens 0 to 19 only occur in microbatch 0 and alone choose expert 5 of the first layer."""
    params, data = without_router(parameters(MODEL)), batch()
    data["tokens"] = data["tokens"] % 20 + 20 * (np.arange(16) >= 8)[:, None].astype(np.int32)
    params["embed"]["w_embed"][:20, 0] = 8.0
    params["embed"]["w_embed"][20:, 0] = -8.0
    params["moe_blocks"]["attention"]["w_o"][0] = 0
    params["moe_blocks"]["moe"]["router"]["w_router"][0, 0, 5] = 1.0
    result, truth = check(run_on(mesh), params, data, ties=True)
    chosen = (truth.routes[0].experts == 5).any(axis=1).reshape(16, 5)
    assert chosen[:8].all()
    assert not chosen[8:].any()
    assert result.gradients["moe_blocks.moe.experts.w_in"][0, 5].any()


@on_every_mesh
def test_p13_a_rank_whose_first_and_last_expert_are_empty(mesh):
    """On two ranks, experts 4 to 7 are one rank's, and 4 and 7 get nothing."""
    bias = np.zeros((2, 8))
    bias[:, [4, 7]] = -100
    check(run_on(mesh), parameters(MODEL), batch(), bias)


@on_every_mesh
def test_p25_balance_and_z_loss_reach_the_router_without_any_cross_entropy(mesh):
    data = batch(padding=True, seed=2)
    data["labels"][:] = -1
    result, truth = check(run_on(mesh), parameters(MODEL), data)
    assert result.metrics["train/loss"] == 0
    assert np.abs(truth.gradients["moe_blocks.moe.router.w_router"]).max(axis=(1, 2)).min() > 1e-3
    assert not result.gradients["head.w_head"].any()


@on_every_mesh
def test_p30_padding_has_no_part_in_router_losses_or_loads(mesh):
    """A batch whose second half of each row is padding reports what the first half alone would."""
    whole, config = batch(seq_len=5, seed=4), run_on(mesh)
    half = {name: value[:, :3] for name, value in whole.items()}
    whole["segment_ids"][:, 3:] = 0
    whole["labels"][:, 3:] = -1
    result = gradients(config, parameters(MODEL), whole)
    truth = oracle_of(config, parameters(MODEL), half)
    assert result.metrics["moe/balance_loss"] == pytest.approx(truth.balance.mean(), rel=1e-6)
    assert result.metrics["moe/router_z_loss"] == pytest.approx(truth.router_z.mean(), rel=1e-6)
    np.testing.assert_allclose(result.metrics["moe/expert_load"], truth.counts / truth.counts.sum(axis=1, keepdims=True), rtol=1e-6)


@on_every_mesh
def test_p31_balance_loss_is_a_mean_over_layers_and_not_of_pooled_layers(mesh):
    """Layer 0 crowds experts 0 and 1, layer 1 experts 2 and 3. Pooled over layers, four experts share the routes: at most 8 / 4 = 2."""
    params, bias = parameters(MODEL), np.zeros((2, 8))
    params["embed"]["w_embed"][:, 0] = 9.0
    for layer, experts in ((0, [0, 1]), (1, [2, 3])):
        params["moe_blocks"]["moe"]["router"]["w_router"][layer, 0, experts] = 2.0
        bias[layer, experts] = 100, 99
    result, truth = check(run_on(mesh), params, batch(), bias)
    assert truth.balance.min() > 2.5
    assert result.metrics["moe/balance_loss"] == pytest.approx(truth.balance.mean(), rel=1e-5)
