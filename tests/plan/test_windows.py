"""Sliding windows in the compiled step: a loop for each run of equal windows, and no copy of the weights because of it."""

import pytest

from moejax.config import AttentionConfig, DataConfig, MeshConfig, ModelConfig, TrainConfig
from moejax.nn.segments import split
from tests.plan.programs import compiled

pytestmark = pytest.mark.slow

LAYERS = 8
PATTERN = (128, 128, 128, -1)


def program_of(window_pattern):
    attention = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=128, window_pattern=window_pattern)
    shape = {"vocab_size": 2048, "embed_dim": 1024, "num_layers": LAYERS, "num_dense_layers": LAYERS, "mlp_dim": 4096, "moe": None}
    config = TrainConfig(
        name="windows",
        steps=10,
        batch_size=2,
        microbatches=2,
        model=ModelConfig(**shape, attention=attention, dtype="bfloat16", recompute="block"),
        mesh=MeshConfig(),
        data=DataConfig(source="files", paths=("none.npy",), seq_len=1024),
    )
    return config, compiled(config, "h200")


def test_windows_cost_loops_and_not_memory():
    _, uniform = program_of((-1,))
    config, windowed = program_of(PATTERN)
    assert len(split(tuple(config.model.window(layer) for layer in range(LAYERS)))) > 1
    kernels = {"__cudnn$fmhaSoftmax": 2 * 2 * LAYERS, "__cudnn$fmhaSoftmaxBackward": 2 * LAYERS}  # twice forward, because of recomputation
    for program in (uniform, windowed):
        found = program.hlo.kernels()
        assert {name: found[name] for name in kernels} == kernels
        assert program.hlo.conditionals() == []
    weights = 2 * LAYERS * (3 * 1024 * 4096 + 2 * 1024 * 128 * (8 + 2))
    print(f"temp {uniform.temp_bytes / 2**20:.0f} MiB, with windows {windowed.temp_bytes / 2**20:.0f}; weights {weights / 2**20:.0f}")
    assert windowed.temp_bytes - uniform.temp_bytes < 0.6 * weights  # one period is read at a time; slices would copy all weights
