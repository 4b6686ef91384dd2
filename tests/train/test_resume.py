"""Resuming with the real step: to the bit on the same mesh, within rounding on another."""

import dataclasses
import logging
import shutil

import jax
import numpy as np
import pytest

from moejax import checkpoint
from moejax.config import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    TrainConfig,
)
from moejax.parallel import make_mesh
from moejax.train import loop, restore_state
from moejax.train.durable import abstract_durable
from moejax.train.metrics import read_records
from moejax.train.run_dir import run_path


def _config(run_dir, **changes) -> TrainConfig:
    router = RouterConfig(bias_update_rate=0.01)
    settings = {
        "name": "resume",
        "steps": 6,
        "batch_size": 4,
        "run_dir": str(run_dir),
        "mesh": MeshConfig(ep=2),
        "model": ModelConfig(
            vocab_size=258,
            embed_dim=16,
            num_layers=1,
            attention=AttentionConfig(num_heads=2),
            moe=MoEConfig(num_experts=4, top_k=2, expert_dim=8, router=router),
        ),
        "data": DataConfig(seq_len=16),
        "optim": OptimConfig(lr=1e-2, skip_window=4),
        "checkpoint": CheckpointConfig(every=3, keep=5),
        "eval": EvalConfig(every=3, sequences=8),
        "log": LogConfig(every=2),
    }
    return TrainConfig(**(settings | changes))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps in one go. Later runs of this file find their programs in the compilation cache."""
    folder = tmp_path_factory.mktemp("resume")
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config = _config(folder / "straight")
    assert loop.train(config) == 0
    yield folder, config
    jax.config.update("jax_compilation_cache_dir", None)


def _cut_back(straight, name: str) -> TrainConfig:
    """A copy of the run as if it had been killed after its third step was saved."""
    folder, config = straight
    shutil.copytree(folder / "straight", folder / name)
    shutil.rmtree(folder / name / "checkpoints" / "6")
    return dataclasses.replace(config, run_dir=str(folder / name))


def _values(config: TrainConfig, kind: str, name: str) -> list[float]:
    return [record[name] for record in read_records(run_path(config) / "metrics.jsonl") if record["kind"] == kind]


def _arrays(config: TrainConfig):
    wanted = abstract_durable(config, make_mesh(config.mesh))
    return checkpoint.restore(run_path(config) / "checkpoints", 6, wanted)


def test_six_steps_equal_three_resumed_for_three_to_the_bit_with_one_compilation(straight, caplog):
    resumed = _cut_back(straight, "resumed")
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        assert loop.train(resumed) == 0
    assert len([record for record in caplog.records if "Finished XLA compilation of jit(step)" in record.getMessage()]) == 1
    for kind, name in (("train", "train/loss"), ("train", "optim/grad_norm"), ("train", "moe/balance_loss"), ("eval", "eval/loss")):
        assert _values(resumed, kind, name) == _values(straight[1], kind, name)
    jax.tree.map(np.testing.assert_array_equal, _arrays(resumed), _arrays(straight[1]))


def test_another_mesh_continues_with_the_same_losses(straight):
    moved = dataclasses.replace(_cut_back(straight, "moved"), mesh=MeshConfig())
    assert loop.train(moved) == 0
    np.testing.assert_allclose(_values(moved, "train", "train/loss"), _values(straight[1], "train", "train/loss"), atol=1e-5)
    np.testing.assert_allclose(_values(moved, "eval", "eval/loss"), _values(straight[1], "eval", "eval/loss"), atol=1e-5)


def test_python_gets_the_state_of_a_checkpoint_on_any_mesh(straight):
    folder, config = straight
    moved = restore_state(folder / "straight", config=dataclasses.replace(config, mesh=MeshConfig(dp=2, ep=2)), step=3)
    saved = restore_state(folder / "straight", step=3)
    assert int(moved.step) == int(saved.step) == 3
    assert moved.params["moe_blocks"]["moe"]["experts"]["w_in"].sharding.mesh.shape["dp"] == 2
    jax.tree.map(np.testing.assert_array_equal, moved, saved)
    assert int(restore_state(folder / "straight").step) == 6


def test_training_went_somewhere(straight):
    losses = _values(straight[1], "train", "train/loss")
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.01
