"""Router metrics from counts small enough to work out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.nn import MoEStats
from moejax.parallel.expert import Traffic
from moejax.train.router_metrics import router_metrics

STATS = MoEStats(
    counts=jnp.array([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]),
    balance_loss=jnp.array([6.0, 4.0]),
    z_loss=jnp.array([1.0, 3.0]),
    traffic=Traffic(routes=jnp.array([8.0, 8.0]), dropped=jnp.array([2.0, 0.0]), demand=jnp.array([99.0, 99.0])),
)


def metrics_of(stats, ranks=2):
    return {name: np.asarray(value) for name, value in router_metrics(stats, jnp.array([1.5, 0.5]), jnp.float32(4), ranks=ranks).items()}


def test_every_metric():
    expected = {
        "moe/balance_loss": (6 + 4) / 2 / 4,
        "moe/router_z_loss": (1 + 3) / 2 / 4,
        "moe/drop_fraction": 2 / 16,
        "moe/buffer_demand": 1.5,
        "moe/max_load": 4 / 2,
        "moe/rank_max_load": 4 / 4,
        "moe/expert_load": [[0.5, 0.0, 0.25, 0.25], [0.25] * 4],
        "moe/layer_drop": [2 / 8, 0.0],
    }
    result = metrics_of(STATS)
    assert set(result) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(("ranks", "expected"), [(1, 1.0), (2, 1.0), (4, 2.0)])
def test_load_of_ranks_adds_up_their_experts(ranks, expected):
    assert metrics_of(STATS, ranks)["moe/rank_max_load"] == pytest.approx(expected)


def test_a_step_of_padding_alone_is_finite():
    zeros = jnp.zeros(2)
    empty = MoEStats(jnp.zeros((2, 4)), zeros, zeros, Traffic(zeros, zeros, zeros))
    assert all(np.isfinite(value).all() for value in metrics_of(empty).values())
