"""What each balance loss depends on: local on (rank, microbatch), global on the microbatch alone. Both equal the oracle there."""

import dataclasses

import numpy as np
import pytest

from moejax.config import TrainConfig
from tests.oracle.compare import check, gradients, mesh_id, oracle_of
from tests.oracle.examples import batch, model_config, parameters, train_config

MODEL = model_config(
    attention={"num_heads": 4, "num_kv_heads": 2, "window_pattern": (3,), "full_attention_ends": False},
    router={"gating": "topk_softmax", "normalize": None, "balance_loss": "global", "balance_loss_weight": 1.0, "z_loss_weight": 0.05},
)
DATA = {"documents": True, "padding": True, "seed": 7}


def run(dp: int, ep: int, microbatches: int, kind: str = "global") -> TrainConfig:
    router = dataclasses.replace(MODEL.moe.router, balance_loss=kind)
    model = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, router=router))
    return train_config(model, dp=dp, ep=ep, microbatches=microbatches)


def balance_loss(config: TrainConfig) -> float:
    return float(gradients(config, parameters(MODEL), batch(**DATA)).metrics["moe/balance_loss"])


@pytest.mark.parametrize("mesh", [(8, 1), (2, 4)], ids=mesh_id)
def test_global_loss_and_its_gradients_equal_the_oracle(mesh):
    check(run(*mesh, 2), parameters(MODEL), batch(**DATA))


@pytest.mark.parametrize("mesh", [(8, 1), (2, 4)], ids=mesh_id)
def test_global_loss_does_not_depend_on_dp_or_ep(mesh):
    """The oracle's value on one device is the value on eight."""
    one = oracle_of(run(1, 1, 2), parameters(MODEL), batch(**DATA)).balance.mean()
    assert balance_loss(run(*mesh, 2)) == pytest.approx(one, rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "global"])
def test_p28_stages_change_no_balance_loss(kind):
    """Local and global statistics are of the same tokens with stages; the value is that of the oracle without them."""
    config = run(2, 1, 2, kind)
    piped = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, pp=2))
    assert balance_loss(piped) == pytest.approx(oracle_of(config, parameters(MODEL), batch(**DATA)).balance.mean(), rel=2e-6)


def test_global_loss_is_a_function_of_the_microbatch():
    """Another number of microbatches is another statistic, by more than the tolerance of the tests above."""
    one, two = (oracle_of(run(1, 1, m), parameters(MODEL), batch(**DATA)).balance.mean() for m in (1, 2))
    assert abs(one - two) > 1e-4


def test_p35_global_loss_over_dp_is_that_of_the_concatenated_batch():
    config = run(8, 1, 2)
    truth = oracle_of(config, parameters(MODEL), batch(**DATA))
    halves = [{name: value[rows] for name, value in batch(**DATA).items()} for rows in (slice(0, 8), slice(8, 16))]
    alone = [oracle_of(train_config(config.model, batch_size=8), parameters(MODEL), half) for half in halves]
    real = [(half["segment_ids"] != 0).sum() for half in halves]
    concatenated = np.average([of_half.balance for of_half in alone], axis=0, weights=real)
    np.testing.assert_allclose(truth.balance, concatenated, rtol=1e-12)
    assert balance_loss(config) == pytest.approx(concatenated.mean(), rel=2e-6)


def test_p36_balance_loss_is_one_at_equal_scores_and_num_experts_over_top_k_when_all_crowd_and_rises_between():
    """The router prefers experts 2 and 5 of 8 for every token, more and more; embeddings share one large component that it reads."""
    params, values = parameters(MODEL), []
    params["embed"]["w_embed"][:, 0] = 9.0
    for strength in (0.0, 0.1, 0.3, 1.0, 20.0):
        w_router = np.zeros_like(params["moe_blocks"]["moe"]["router"]["w_router"])
        w_router[:, 0, [2, 5]] = strength
        params["moe_blocks"]["moe"]["router"]["w_router"] = w_router
        values.append(float(gradients(run(8, 1, 2), params, batch(**DATA)).metrics["moe/balance_loss"]))
    assert values[0] == pytest.approx(1, rel=1e-6)
    assert values[-1] == pytest.approx(8 / 2, rel=1e-4)
    assert (np.diff(values) > 1e-2).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "global"])
@pytest.mark.parametrize("layout", [(1, 1, 4), (2, 4, 1)], ids=str)
def test_other_layouts_equal_the_oracle(layout, kind):
    check(run(*layout, kind), parameters(MODEL), batch(**DATA))


@pytest.mark.parametrize("layouts", [((1, 1, 2), (1, 2, 1)), ((1, 1, 4), (2, 2, 1)), ((1, 4, 2), (2, 4, 1))], ids=str)
def test_local_loss_is_a_function_of_rank_and_microbatch_together(layouts):
    """The oracle's local groups are the rows of one (rank, microbatch): the same rows, the same loss."""
    first, second = (oracle_of(run(*layout, "local"), parameters(MODEL), batch(**DATA)).balance for layout in layouts)
    np.testing.assert_allclose(first, second, rtol=1e-12)
    whole = oracle_of(run(1, 1, 1, "local"), parameters(MODEL), batch(**DATA)).balance
    assert np.abs(first - whole).max() > 1e-3
