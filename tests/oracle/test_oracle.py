"""The oracle against hand-worked numbers, finite differences and an independent library's recorded outputs."""

import math
from pathlib import Path

import numpy as np
import pytest

from moejax.config import OptimConfig, ScheduleConfig
from tests.oracle import Layout, Optimizer, flatten, kept_routes, learning_rate, step_oracle
from tests.oracle.examples import batch, model_config, parameters
from tests.oracle.losses import nest


def test_capacity_fills_a_rank_by_expert_then_source_then_token():
    # Two ranks, four experts, three tokens each, one route a token; rank 0 owns experts 0 and 1 and has ceil(0.75 * 3) = 3 rows.
    experts = np.array([[[1], [0], [1]], [[1], [0], [3]]])
    kept = kept_routes(experts, np.ones((2, 3), bool), num_experts=4, capacity_factor=0.75)
    # Expert 0 takes source 0 token 1 and source 1 token 1; expert 1 has one row left, for source 0 token 0.
    assert kept[..., 0].tolist() == [[True, True, False], [False, True, True]]


def test_capacity_counts_padding_positions_as_room_but_never_as_rows():
    experts = np.zeros((1, 4, 1), int)
    real = np.array([[False, True, True, False]])
    kept = kept_routes(experts, real, num_experts=1, capacity_factor=0.5)
    assert kept[0, :, 0].tolist() == [False, True, True, False]


def test_capacity_factor_is_the_decimal_that_was_typed():
    # 1.1 * 10 is 11.000000000000002 in floating point.
    experts = np.zeros((2, 10, 1), int)
    assert kept_routes(experts, np.ones((2, 10), bool), num_experts=2, capacity_factor=1.1).sum() == 11


def test_layout_deals_each_microbatch_to_ranks_in_order():
    layout = Layout(dp=2, ep=2, microbatches=2)
    assert [layout.rows(16, 1, rank).tolist() for rank in range(4)] == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert [rows.tolist() for rows in layout.groups(16, "global")] == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("kind", ["local", "instance", "global"])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "topk_softmax"])
def test_balance_is_one_when_all_scores_are_equal(kind, gating):
    config = model_config(router={"balance_loss": kind, "gating": gating})
    params = parameters(config)
    params["moe_blocks"]["moe"]["router"]["w_router"][:] = 0
    result = step_oracle(params, None, batch(padding=True), config, Layout(2, 2, 2), gradients=False)
    np.testing.assert_allclose(result.balance, 1.0, rtol=1e-12)


RICH = {
    "num_layers": 3,
    "num_dense_layers": 1,
    "mlp_dim": 20,
    "norm_placement": "peri",
    "embed_norm": True,
    "embed_scale": 3.0,
    "z_loss_weight": 0.01,
    "moe": {"num_shared_experts": 2, "shared_expert_dim": 10, "capacity_factor": 0.7},
    "router": {
        "gating": "sigmoid",
        "normalize": 2.0,
        "restore_scale": True,
        "scale": 1.7,
        "balance_loss_weight": 0.3,
        "z_loss_weight": 0.1,
    },
    "attention": {"qk_norm": "width", "window_pattern": (3, -1), "full_attention_ends": False},
}


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "norm_placement": "post"}, {"attention": {"qk_norm": "head"}}])
def test_gradient_agrees_with_a_finite_difference_along_a_random_direction(changes):
    config = model_config(**(RICH | changes))
    params, data, layout = parameters(config), batch(documents=True, padding=True), Layout(1, 2, 2)
    truth = step_oracle(params, None, data, config, layout)
    assert truth.dropped.sum() > 0
    flat = {name: value.astype(np.float64) for name, value in flatten(params).items()}
    rng = np.random.default_rng(1)
    direction = {name: rng.normal(size=value.shape) for name, value in flat.items()}

    def loss_at(step):
        moved = nest(flat, [flat[name] + step * direction[name] for name in flat])
        # Balance counts carry no gradient, and neither do routes: both stay as they are.
        return step_oracle(moved, None, data, config, layout, routes=truth.routes, gradients=False).total

    slope = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    predicted = sum(float(np.sum(truth.gradients[name] * direction[name])) for name in flat)
    assert slope == pytest.approx(predicted, rel=1e-7)


def test_model_equals_the_recorded_outputs_of_another_library():
    # Random weights of the Hugging Face class Olmo3Moe (one dense block, one shared expert, reordered norm, window 8, QK norm over
    # the width, weights normalised and restored); logits computed in float64, gradients in float32, by PyTorch.
    with np.load(Path(__file__).with_name("olmo3moe_reference.npz")) as data:
        case = dict(data)
    config = model_config(
        vocab_size=96,
        embed_dim=32,
        num_layers=3,
        num_dense_layers=1,
        mlp_dim=48,
        norm_placement="post",
        norm_eps=1e-5,
        attention={
            "num_heads": 4,
            "num_kv_heads": 4,
            "rope_theta": 10_000.0,
            "qk_norm": "width",
            "window_pattern": (8, -1),
            "full_attention_ends": False,
        },
        moe={"expert_dim": 16, "num_shared_experts": 1, "shared_expert_dim": 24},
        router={"normalize": 1.0, "restore_scale": True, "balance_loss": "none"},
    )
    params = {name.removeprefix("param/"): value for name, value in case.items() if name.startswith("param/")}
    tokens = case["tokens"]
    data = {
        "tokens": tokens,
        "labels": np.concatenate([tokens[:, 1:], np.full((2, 1), -1)], axis=1),
        "segment_ids": np.ones_like(tokens),
        "positions": np.tile(np.arange(tokens.shape[1]), (2, 1)),
    }
    result = step_oracle(nest(params, params.values()), None, data, config)
    np.testing.assert_allclose(result.logits, case["logits"], atol=2e-6)  # PyTorch's rotary tables and norms are float32 even there
    assert result.ce == pytest.approx(float(case["loss"]), abs=1e-6)
    for name, value in result.gradients.items():
        norm, projection = case[f"grad/{name}"]
        assert np.linalg.norm(value) == pytest.approx(norm, rel=1e-5), name
        assert np.sum(value * probe(value.shape)) == pytest.approx(projection, abs=2e-5 * norm), name


def probe(shape) -> np.ndarray:
    """A fixed direction of unit length, on which a recorded gradient was projected."""
    wave = np.cos(1 + 1.7 * np.arange(math.prod(shape))).reshape(shape)
    return wave / np.linalg.norm(wave)


def test_adamw_first_step_is_the_sign_of_the_gradient_times_lr_plus_decay():
    optim = OptimConfig(lr=0.1, weight_decay=0.5, no_decay=("b",), max_grad_norm=None, schedule=ScheduleConfig(kind="constant"), eps=1e-12)
    optimizer = Optimizer(optim, 10, {"a": np.array([2.0]), "b": np.array([2.0])})
    assert optimizer.apply({"a": np.array([3.0]), "b": np.array([-7.0])}, loss=1.0)
    np.testing.assert_allclose([optimizer.master["a"][0], optimizer.master["b"][0]], [2 - 0.1 - 0.1 * 0.5 * 2, 2 + 0.1])


def test_skip_rule_needs_half_a_window_and_remembers_outliers_but_not_nan():
    optim = OptimConfig(lr=0.1, skip_sigma=3.0, skip_window=8, schedule=ScheduleConfig(kind="constant"))
    optimizer = Optimizer(optim, 10, {"a": np.array([2.0])})
    one = {"a": np.array([1.0])}
    assert [optimizer.apply(one, loss) for loss in (2.0, 9.0, 2.0)] == [True, True, True]  # too early to judge
    assert not optimizer.apply(one, math.nan)
    assert len(optimizer.history) == 3
    optimizer.history = [(2.0, 1.0), (2.1, 1.0), (1.9, 1.0), (2.0, 1.0)]
    assert not optimizer.apply(one, 9.0)
    assert optimizer.history[-1][0] == 9.0
    assert not optimizer.apply({"a": np.array([math.inf])}, 2.0)


def test_schedules_reach_their_ends():
    cosine = OptimConfig(lr=2.0, schedule=ScheduleConfig(kind="cosine", warmup_steps=4, final_fraction=0.1))
    assert [learning_rate(cosine, 12, step) for step in (0, 3)] == [0.5, 2.0]
    assert learning_rate(cosine, 12, 7) == pytest.approx(1.1)
    assert learning_rate(cosine, 12, 11) == pytest.approx(0.2)
    wsd = OptimConfig(lr=2.0, schedule=ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=4, final_fraction=0.0))
    assert [learning_rate(wsd, 10, step) for step in (1, 5, 7, 9)] == [2.0, 2.0, 1.0, 0.0]
