"""With a capacity: losses, drops and every gradient equal the oracle, which drops by the plain rule of tests/oracle/capacity.py."""

import numpy as np
import pytest

from tests.oracle.compare import check, gradients, mesh_id, oracle_of
from tests.oracle.examples import batch, model_config, parameters, train_config

RICH = model_config(
    num_layers=3,
    num_dense_layers=1,
    mlp_dim=20,
    norm_placement="post",
    embed_norm=True,
    embed_scale=3.0,
    tie_embeddings=True,
    z_loss_weight=0.02,
    attention={"qk_norm": "width", "window_pattern": (2, -1), "full_attention_ends": False},
    moe={"num_shared_experts": 2, "shared_expert_dim": 10, "capacity_factor": 0.7},
    router={"normalize": 2.0, "restore_scale": True, "scale": 1.7, "balance_loss_weight": 0.3, "z_loss_weight": 0.05},
)
"""A dense block, two shared experts, sliding windows, tied embeddings; each rank takes 0.7 of an even load."""

DATA = {"documents": True, "padding": True, "seed": 2}
on_meshes = pytest.mark.parametrize("mesh", [pytest.param((1, 2), marks=pytest.mark.slow), (2, 4)], ids=mesh_id)


def run_on(mesh):
    return train_config(RICH, dp=mesh[0], ep=mesh[1], microbatches=2)


@on_meshes
def test_losses_drops_and_gradients_equal_the_oracle(mesh):
    result, truth = check(run_on(mesh), parameters(RICH), batch(**DATA))
    assert truth.dropped.min() > 0
    assert result.metrics["moe/drop_fraction"] > 0.05


@on_meshes
def test_every_token_on_one_rank_drops_most_of_them(mesh):
    bias = np.zeros((2, 8))
    bias[:, [1, 0]] = 100, 99
    result, _ = check(run_on(mesh), parameters(RICH), batch(**DATA), bias)
    assert result.metrics["moe/drop_fraction"] > 0.3
    assert result.metrics["moe/buffer_demand"] > 1


@on_meshes
def test_ties_between_all_experts(mesh):
    params = parameters(RICH)
    params["moe_blocks"]["moe"]["router"]["w_router"] *= 0
    check(run_on(mesh), params, batch(**DATA), ties=True)


@on_meshes
def test_rows_of_padding_take_no_capacity(mesh):
    data = batch(seed=6)
    for name, fill in (("segment_ids", 0), ("labels", -1)):
        data[name][[0, 1, 2, 5, 9, 10, 11, 15]] = fill
    _, truth = check(run_on(mesh), parameters(RICH), data)
    without_padding = oracle_of(run_on(mesh), parameters(RICH), batch(seed=6))
    assert truth.dropped.sum() < without_padding.dropped.sum() / 2


@on_meshes
def test_p24_reported_drops_are_those_counted_from_the_router_logits(mesh):
    """Experts are preferred in the order of their index, as by Zipf's law; loads and drops are counted again by hand."""
    bias = np.tile(-0.05 * np.arange(8) ** 1.2, (2, 1))
    data = batch(padding=True, seed=5)
    result, truth = check(run_on(mesh), parameters(RICH), data, bias)
    real = (data["segment_ids"] != 0).reshape(-1)
    dropped = sum(int((~routes.kept[real]).sum()) for routes in truth.routes)
    assert result.metrics["moe/drop_fraction"] == pytest.approx(dropped / (2 * 2 * real.sum()), rel=1e-6)
    assert 0.02 < result.metrics["moe/drop_fraction"] < 0.9
    assert truth.counts[:, 0].min() > 3 * truth.counts[:, 7].max()


def test_which_routes_are_dropped_depends_on_the_mesh():
    here, elsewhere = (oracle_of(run_on(mesh), parameters(RICH), batch(**DATA)).ce for mesh in ((2, 4), (1, 2)))
    assert gradients(run_on((2, 4)), parameters(RICH), batch(**DATA)).metrics["train/loss"] == pytest.approx(here, rel=2e-6)
    assert abs(here - elsewhere) > 1e-4
