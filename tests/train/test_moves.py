"""Runs that stop on one mesh and go on upon another: the same losses, and every expert in its place."""

import dataclasses
import shutil

import numpy as np
import pytest

from moejax.config import EvalConfig, MeshConfig, OptimConfig, ScheduleConfig, TrainConfig
from moejax.train import loop
from moejax.train.run_dir import run_path
from tests.oracle.compare import sharding_small_leaves
from tests.oracle.examples import model_config
from tests.train.test_resume import _config, _values

pytestmark = pytest.mark.slow

MODEL = model_config(
    vocab_size=258,
    num_layers=9,
    num_dense_layers=1,
    mlp_dim=12,
    moe={"num_experts": 8, "top_k": 2, "expert_dim": 8},
    router={"bias_update_rate": 0.01, "balance_loss": "instance"},  # neither changes with the microbatches
)
MESHES = {
    "1 device": MeshConfig(),
    "ep8": MeshConfig(ep=8),
    "dp4 ep2": MeshConfig(dp=4, ep=2),
    "dp2 ep4 fsdp": MeshConfig(dp=2, ep=4, weights="fsdp"),
    "pp2 ep4": MeshConfig(pp=2, ep=4),
    "pp2 V2 dp2 ep2": MeshConfig(pp=2, dp=2, ep=2, virtual_stages=2),
    "pp4 dp2": MeshConfig(pp=4, dp=2, schedule="gpipe"),
    "pp4 V2 ep2": MeshConfig(pp=4, ep=2, virtual_stages=2),
    "pp2 V ep2": MeshConfig(pp=2, ep=2, virtual_stages=2, schedule="v_shaped"),
}
PAIRS = [
    ("pp2 V2 dp2 ep2", "1 device"),
    ("1 device", "pp2 V ep2"),
    ("dp4 ep2", "pp2 ep4"),
    ("pp4 dp2", "ep8"),
    ("ep8", "pp4 V2 ep2"),
    ("dp2 ep4 fsdp", "pp2 V2 dp2 ep2"),
]
"""Mesh that a run begins on, and mesh that it goes on upon."""


def run(folder, mesh: str, steps: int) -> TrainConfig:
    """Steps of a run in that directory, from where it is."""
    optim = OptimConfig(lr=1e-2, schedule=ScheduleConfig(kind="constant"))  # whatever the number of steps
    config = _config(folder, model=MODEL, steps=steps, batch_size=8, optim=optim, eval=EvalConfig(every=None))
    ways = MESHES[mesh]
    config = dataclasses.replace(config, mesh=ways, microbatches=8 // ways.data_ranks if ways.pp > 1 else 1)
    with sharding_small_leaves():
        assert loop.train(config) == 0
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps on one device without a stop; with three of them saved."""
    folder = tmp_path_factory.mktemp("moves")
    return folder, _values(run(folder / "straight", "1 device", 6), "train", "train/loss")


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_upon_another_mesh(straight, before, after):
    folder, losses = straight
    place = folder / f"{before} to {after}"
    run(place, before, 3)
    config = run(place, after, 6)
    moved = _values(config, "train", "train/loss")
    assert len(moved) == 6
    np.testing.assert_allclose(moved, losses, rtol=1e-5)
    shutil.rmtree(run_path(config))
