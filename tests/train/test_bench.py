"""The benchmark of the whole step: what it runs, and what its numbers mean."""

import pytest

from moejax.train import flops
from moejax.train.bench import Shape, measure, traffic

SMALL = Shape(experts=4, dtype="float32", batch=1, seq=4, vocab=8)


def test_the_model_is_the_one_that_is_documented():
    model = Shape(experts=16, dtype="float32", batch=4, seq=128, vocab=2048).config().model
    assert (model.embed_dim, model.num_layers, model.attention.num_heads, model.head_dim, model.vocab_size) == (256, 4, 8, 32, 2048)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.expert_dim, model.moe.num_shared_experts) == (16, 4, 256, 0)
    assert model.moe.capacity_factor is None


@pytest.mark.parametrize(("dtype", "optimizer", "weights"), [("float32", 32, 12), ("bfloat16", 30, 6)])
def test_traffic_is_bytes_for_each_parameter(dtype, optimizer, weights):
    config = Shape(experts=8, dtype=dtype, batch=1, seq=4, vocab=8).config()
    count, _ = flops.count_parameters(config.model)
    assert traffic(config) == {"optimizer_bytes": count * optimizer, "weights_bytes": count * weights}


def test_shares_follow_from_the_times():
    line = measure(SMALL, 2)
    assert line["tokens"] == 4
    assert line["tokens_per_s"] == pytest.approx(4 / line["step_s"])
    assert line["gemm_share"] == pytest.approx(line["useful_flops"] / line["step_s"] / line["gemm_flops_per_s"])
    assert line["growth_s"] == pytest.approx((line["optimizer_bytes"] + line["weights_bytes"]) / line["copy_bytes_per_s"])
    assert 0 < line["optimizer_share"] < 2
    assert min(line["compile_s"], line["cpu_s"], line["gemm_flops_per_s"]) > 0
