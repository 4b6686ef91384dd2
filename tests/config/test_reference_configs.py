"""The reference configs beside the published table: sizes to their printed digits, GPUs, mesh, batch, recipe.

Active parameters are all that one token uses: top_k of the routed experts and everything else, embeddings too. Counted so, every figure
is the published one.
"""

import math

import pytest

from moejax.config import TrainConfig, load_config, pending
from moejax.train.flops import count_parameters

MI = 2**20

POINTS = [
    # name, total, active, nodes, ep, pp, Mi tokens a step, sequences of a GPU's microbatch
    ("eight_layers", "24.31B", "3.17B", 1, 8, 1, 4, 2),
    ("tiny_64e", "12.91B", "1.59B", 2, 1, 1, 8, 8),
    ("small_64e", "40.86B", "4.29B", 16, 8, 1, 24, 3),
    ("medium_64e", "70.22B", "7.37B", 16, 8, 2, 16, 2),
    ("medium_96e", "103.75B", "7.38B", 16, 8, 2, 24, 2),
    ("medium_128e", "137.27B", "7.38B", 16, 8, 4, 24, 2),
    ("large_128e", "295.99B", "15.14B", 64, 8, 4, 32, 1),
    ("ultra_128e", "1200.48B", "58.36B", 64, 8, 8, 64, 1),
    ("ultra_256e", "2379.50B", "58.41B", 64, 32, 8, 64, 2),
]
VARIANTS = [
    ("eight_layers --model.moe.num-experts 8", "4.58B", "3.17B", 1, 8, 1, 4, 2),
    ("eight_layers --model.moe.num-experts 32", "13.04B", "3.17B", 1, 8, 1, 4, 2),
    ("eight_layers --model.moe.num-experts 48", "18.67B", "3.17B", 1, 8, 1, 4, 2),
    ("eight_layers --model.moe.num-experts 128", "46.86B", "3.17B", 1, 8, 1, 4, 2),
    ("eight_layers --mesh.dp 8 --mesh.ep 1", "24.31B", "3.17B", 1, 1, 1, 4, 2),
    ("tiny_64e --model.moe.router.assignment learned --mesh.dp 2 --mesh.ep 8", "12.91B", "1.59B", 2, 8, 1, 8, 8),
    ("small_64e --model.moe.router.assignment learned", "40.86B", "4.29B", 16, 8, 1, 24, 3),
    ("small_64e --batch-size 2048", "40.86B", "4.29B", 16, 8, 1, 16, 2),
    ("large_128e --mesh.pp 8 --mesh.dp 8 --batch-size 3072 --microbatches 48", "295.99B", "15.14B", 64, 8, 8, 24, 1),
]
PRODUCTION = [point[0] for point in POINTS if point[0] != "eight_layers"]


def loaded(words: str) -> TrainConfig:
    name, *overrides = words.split()
    return load_config(name, overrides)


@pytest.mark.parametrize(("words", "total", "active", "nodes", "ep", "pp", "mi_tokens", "sequences"), [*POINTS, *VARIANTS])
def test_sizes_and_layout_are_the_published_ones(
    words: str, total: str, active: str, nodes: int, ep: int, pp: int, mi_tokens: int, sequences: int
) -> None:
    config = loaded(words)
    assert [f"{count / 1e9:.2f}B" for count in count_parameters(config.model)] == [total, active]
    mesh = config.mesh
    assert (mesh.num_devices, mesh.ep, mesh.pp) == (8 * nodes, ep, pp)
    assert mesh.virtual_stages == (2 if pp > 1 else 1)
    assert (config.data.seq_len, config.model.vocab_size) == (8192, 100_352)
    assert config.batch_size * config.data.seq_len == mi_tokens * MI
    assert config.microbatch_size == sequences * mesh.data_ranks


@pytest.mark.parametrize("name", PRODUCTION)
def test_the_recipe_of_the_family(name: str) -> None:
    config = load_config(name)
    model, optim, tokens = config.model, config.optim, config.batch_size * config.data.seq_len
    base = 1.2e-4 if name.startswith(("large", "ultra")) else 1.8e-4
    assert optim.lr == pytest.approx(base * (tokens / (8 * MI)) ** 0.53)
    assert (optim.b1, optim.b2, optim.weight_decay, optim.skip_sigma, optim.max_grad_norm) == (0.9, 0.95, 0.1, 12.0, 1.0)
    assert (optim.schedule.kind, optim.schedule.warmup_steps) == ("wsd", int(30e9 // tokens))
    assert abs(config.steps * tokens - 200e9) <= tokens / 2
    assert model.embed_scale == pytest.approx(math.sqrt(model.embed_dim))
    assert (model.norm_placement, model.norm_eps, model.embed_norm, model.attention.qk_norm) == ("peri", 1e-6, True, "head")
    assert (model.init_std, model.z_loss_weight, model.dtype) == (0.01, 1e-4, "bfloat16")
    assert model.moe is not None
    assert model.mlp_dim == model.moe.top_k * model.moe.expert_dim + model.moe.shared_expert_dim
    router = model.moe.router
    assert (router.gating, router.assignment, router.normalize, router.restore_scale) == ("softmax", "random", 1.0, True)
    assert (router.balance_loss, router.z_loss_weight, model.moe.capacity_factor) == ("local", 2e-4, 1.1875)
    is_ultra = name.startswith("ultra")
    assert (model.precision, model.recompute) == (("mxfp8", "block") if is_ultra else ("plain", "none"))


def test_the_recipe_of_the_eight_layer_benchmark() -> None:
    config = load_config("eight_layers")
    model, optim = config.model, config.optim
    assert (optim.lr, optim.schedule.kind, optim.schedule.warmup_steps, optim.skip_sigma) == (3e-4, "cosine", 10, 12.0)
    assert model.moe is not None
    assert (model.moe.capacity_factor, model.moe.router.balance_loss_weight, model.moe.router.z_loss_weight) == (1.25, 0.015, 1e-4)
    assert (model.norm_placement, model.moe.router.assignment) == ("post", "random")


def test_what_can_train_and_what_is_planned_alone() -> None:
    assert [name for name, *_ in POINTS if not pending(load_config(name))] == [name for name, *_ in POINTS if not name.startswith("ultra")]
