"""Parameters of a checkpoint for evaluation and generation."""

import re

import numpy as np
import pytest

from moejax.errors import CheckpointError
from moejax.parallel import make_mesh
from moejax.testing import named_leaves
from moejax.train.restore import restore_parameters
from tests.oracle.compare import cast
from tests.oracle.examples import model_config, on_mesh, parameters, train_config
from tests.train.saved_run import save_run

CONFIG = train_config(model_config(dtype="bfloat16"))
MASTERS = {step: parameters(CONFIG.model, seed=step) for step in (3, 12)}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), CONFIG, MASTERS)


@pytest.mark.parametrize(("mesh", "wanted", "found"), [((1, 1), None, 12), ((2, 4), 3, 3)], ids=str)
def test_parameters_are_the_masters_of_that_step_cast_on_any_mesh(run_dir, mesh, wanted, found):
    config = on_mesh(CONFIG, *mesh)
    params, router, step = restore_parameters(config, make_mesh(config.mesh), run_dir, wanted)
    assert step == found
    np.testing.assert_array_equal(router["bias"], found)
    expected = named_leaves(cast(MASTERS[found], config))
    assert set(named_leaves(params)) == set(expected)
    for name, value in named_leaves(params).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name, strict=True)


def test_a_step_that_was_not_saved_is_refused(run_dir):
    with pytest.raises(CheckpointError, match="4"):
        restore_parameters(CONFIG, make_mesh(CONFIG.mesh), run_dir, 4)


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    message = f"{tmp_path} holds no checkpoint yet; train it first, or wait for the first save"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        restore_parameters(CONFIG, make_mesh(CONFIG.mesh), tmp_path, None)
