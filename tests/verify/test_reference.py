"""The reference against the tests' own oracle, which shares no code with it: NumPy, another automatic differentiation, Python loops."""

import dataclasses

import numpy as np
import pytest

from moejax.testing import named_leaves
from moejax.verify.reference import Layout, Reference
from tests.oracle import Layout as OracleLayout
from tests.oracle import step_oracle
from tests.oracle.examples import batch, model_config, parameters, train_config
from tests.oracle.test_oracle import RICH

CASES = {
    "rich, local": (RICH, Layout(1, 2, 2)),
    "rich, global": (RICH | {"router": RICH["router"] | {"balance_loss": "global"}}, Layout(2, 2, 2)),
    "instance, tied, dropless": (
        {"tie_embeddings": True, "norm_placement": "post", "router": {"balance_loss": "instance", "balance_loss_weight": 0.5}},
        Layout(2, 4, 1),
    ),
    "topk_softmax, tight": (
        {"moe": {"capacity_factor": 0.4}, "router": {"gating": "topk_softmax", "z_loss_weight": 0.2}},
        Layout(1, 4, 2),
    ),
    "dense": ({"num_layers": 2, "num_dense_layers": 2, "mlp_dim": 12, "z_loss_weight": 0.1}, Layout(2, 1, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_oracle_but_for_constants_in_float32(case):
    changes, layout = CASES[case]
    config = train_config(model_config(**changes))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, document_mask=True, eos_id=0))
    params, data = parameters(config.model), batch(documents=True, padding=True)
    bias = None
    if config.model.moe is not None:
        bias = np.random.default_rng(3).normal(size=(config.model.num_moe_layers, 8)).astype(np.float32) * 0.05
    oracle = step_oracle(params, bias, data, config.model, OracleLayout(layout.dp, layout.ep, layout.microbatches))
    truth = Reference(config, params, bias, data).truth(layout)
    assert truth.losses["cross-entropy"] == pytest.approx(oracle.ce, rel=1e-8)
    assert truth.losses["z-loss"] == pytest.approx(oracle.z_loss, rel=1e-8)
    if truth.report is not None:
        assert truth.losses["balance loss"] == pytest.approx(oracle.balance.mean(), rel=1e-8)
        assert truth.losses["router z-loss"] == pytest.approx(oracle.router_z.mean(), rel=1e-8)
        np.testing.assert_array_equal(truth.report.counts, oracle.counts)
        np.testing.assert_array_equal(truth.report.dropped, oracle.dropped)
    assert set(truth.gradients["total"]) == set(named_leaves(params))
    largest = max(np.abs(value).max() for value in oracle.gradients.values())
    for name, value in oracle.gradients.items():
        np.testing.assert_allclose(truth.gradients["total"][name], value, rtol=1e-6, atol=1e-7 * largest, err_msg=name)
