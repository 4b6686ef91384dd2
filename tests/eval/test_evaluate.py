"""Held-out loss equals the float64 oracle without drops, whatever the batch size, the mesh and the capacity of training."""

import dataclasses
import math

import numpy as np
import pytest

from moejax.config import CheckpointConfig, DataConfig, EvalConfig, MeshConfig
from moejax.config.resolved import read_config
from moejax.data import open_data
from moejax.errors import CheckpointError, ConfigError
from moejax.eval import run_eval
from moejax.parallel import make_mesh
from moejax.testing import assert_scalar_close
from moejax.train.evaluate import evaluate, make_eval_step
from moejax.train.restore import restore_parameters
from tests.oracle import step_oracle
from tests.oracle.compare import cast
from tests.oracle.examples import VOCAB, model_config, parameters, train_config
from tests.train.saved_run import router_at, save_run

SEQUENCES, STEP = 13, 7
MODEL = model_config(
    num_layers=3, num_dense_layers=1, mlp_dim=12, moe={"capacity_factor": 0.1, "num_shared_experts": 1, "shared_expert_dim": 4}
)
PARAMS = parameters(MODEL)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run over random tokens, with documents that end at token 0; 23 sequences are held out."""
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, VOCAB, 400).astype(np.uint16))
    data = DataConfig(source="files", paths=(str(path),), seq_len=5, eval_fraction=0.3, eos_id=0, document_mask=True)
    return dataclasses.replace(train_config(MODEL), data=data, eval=EvalConfig(sequences=SEQUENCES))


@pytest.fixture(scope="module")
def truth(config):
    """Oracle of the first 13 held-out sequences as one batch, with no capacity and the router bias of step 7."""
    rows = list(open_data(config).eval_batches(1, SEQUENCES))
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    dropless = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, capacity_factor=None))
    dropping = step_oracle(PARAMS, None, batch, MODEL, gradients=False)
    exact = step_oracle(PARAMS, router_at(config, STEP)["bias"], batch, dropless, gradients=False)
    assert abs(exact.ce - dropping.ce) > 1e-3
    return exact.ce, int((batch["labels"] >= 0).sum())


def check(results, truth):
    loss, tokens = truth
    assert_scalar_close(results["eval/loss"], loss, "float32", "eval/loss")
    assert results["eval/bits_per_token"] == pytest.approx(results["eval/loss"] / math.log(2))
    assert results["eval/tokens"] == tokens < SEQUENCES * 5


@pytest.mark.parametrize(("mesh", "batch_size"), [((1, 1), 5), ((2, 4), 8)])
def test_loss_is_dropless_and_the_same_for_any_batch_size_and_mesh(config, truth, mesh, batch_size):
    settings = dataclasses.replace(config.eval, batch_size=batch_size)
    config = dataclasses.replace(config, mesh=MeshConfig(dp=mesh[0], ep=mesh[1]), eval=settings)
    devices = make_mesh(config.mesh)
    step = make_eval_step(config, devices)
    check(evaluate(config, devices, step, cast(PARAMS, config), router_at(config, STEP), open_data(config)), truth)


@pytest.fixture(scope="module")
def run_dir(config, tmp_path_factory):
    trained = dataclasses.replace(config, mesh=MeshConfig(ep=2), checkpoint=CheckpointConfig(keep=2))
    return save_run(tmp_path_factory.mktemp("run"), trained, {STEP: PARAMS, 9: parameters(MODEL, seed=1)})


def test_a_run_is_evaluated_on_another_mesh(run_dir, truth):
    results = run_eval(run_dir, step=STEP, mesh=MeshConfig(dp=2), eval=EvalConfig(sequences=SEQUENCES))
    assert results.pop("step") == STEP
    check(results, truth)


def test_a_batch_that_does_not_split_over_the_mesh_is_refused(run_dir):
    with pytest.raises(ConfigError, match=r"eval.batch_size=3 does not split over mesh.dp=2"):
        run_eval(run_dir, step=STEP, mesh=MeshConfig(dp=2), eval=EvalConfig(sequences=SEQUENCES, batch_size=3))


def test_an_evaluation_can_be_stopped_between_batches(run_dir):
    asked = []
    config = dataclasses.replace(read_config(run_dir), mesh=MeshConfig(), eval=EvalConfig(sequences=SEQUENCES, batch_size=1))
    mesh = make_mesh(config.mesh)

    def is_stopped() -> bool:
        asked.append(len(asked))
        return len(asked) > 2

    params, router, _ = restore_parameters(config, mesh, run_dir, STEP)
    assert evaluate(config, mesh, make_eval_step(config, mesh), params, router, open_data(config), is_stopped) is None
    assert len(asked) == 3


def test_the_newest_checkpoint_is_taken_unless_told(run_dir, truth):
    results = run_eval(run_dir, step=None, mesh=MeshConfig(dp=2), eval=EvalConfig(sequences=SEQUENCES, batch_size=2))
    assert results["step"] == 9
    assert results["eval/tokens"] == truth[1]
    assert abs(results["eval/loss"] - truth[0]) > 1e-3


def test_a_checkpoint_that_is_not_there_is_refused(run_dir):
    with pytest.raises(CheckpointError, match="8"):
        run_eval(run_dir, step=8, mesh=MeshConfig(), eval=EvalConfig())
