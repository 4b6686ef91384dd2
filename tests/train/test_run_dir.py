"""Run directories: what starts fresh, what resumes, what is refused and with which way out."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

from moejax.checkpoint import Writer
from moejax.config import EvalConfig, TrainConfig, load_config, read_config
from moejax.errors import CheckpointError
from moejax.train.run_dir import _is_execution, begin, open_run, writing


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    base = load_config("quickstart")
    optim = dataclasses.replace(base.optim, lr=3e-3)
    fixed = {"steps": 400, "batch_size": 32, "seed": 0, "optim": optim, "eval": EvalConfig(every=200)}
    return dataclasses.replace(base, run_dir=str(tmp_path / "run"), **fixed)


def _start(config: TrainConfig, *, steps: tuple[int, ...] = ()) -> None:
    """A run that has begun and written these checkpoints."""
    with open_run(config) as run:
        begin(run, config)
        writer = Writer(run.checkpoints, keep=9)
        for step in steps:
            writer.save(step, {"w": jnp.zeros(4)}, {"tokens_seen": 10 * step, "samples_seen": 2 * step})
        writer.close()


def _replace(config: TrainConfig, **changes) -> TrainConfig:
    return dataclasses.replace(config, **changes)


def test_a_new_directory_starts_fresh(config):
    with open_run(config) as run:
        assert (run.step, run.tokens_seen, run.samples_seen) == (None, 0, 0)
        assert run.notes == (f"new run in {run.path}",)


def test_an_empty_directory_starts_fresh(config, tmp_path):
    (tmp_path / "run").mkdir()
    with open_run(config) as run:
        assert run.step is None


def test_without_run_dir_the_name_decides(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_run(_replace(config, run_dir=None)) as run:
        assert str(run.path) == "runs/quickstart"


def test_the_same_config_resumes_from_the_newest_checkpoint(config):
    _start(config, steps=(2, 10))
    with open_run(config) as run:
        assert (run.step, run.tokens_seen, run.samples_seen) == (10, 100, 20)
        assert run.notes == (f"resuming {run.path} from checkpoint 10",)


def test_execution_settings_may_change_and_are_announced(config):
    _start(config, steps=(2,))
    changed = _replace(
        config,
        steps=999,
        microbatches=2,
        mesh=_replace(config.mesh, ep=4),
        model=_replace(
            config.model,
            recompute="block",
            attention=_replace(config.model.attention, implementation="xla"),
            moe=_replace(config.model.moe, grouped_matmul="reference", transport="gather"),
        ),
        data=_replace(config.data, max_documents=99),
        eval=_replace(config.eval, every=7),
    )
    with open_run(changed) as run:
        assert run.step == 2
        assert set(run.notes[1:]) == {
            "changed since the last start: steps: 400 -> 999",
            "changed since the last start: microbatches: 1 -> 2",
            "changed since the last start: mesh.ep: 1 -> 4",
            "changed since the last start: model.recompute: none -> block",
            "changed since the last start: model.attention.implementation: auto -> xla",
            "changed since the last start: data.max_documents: 64 -> 99",
            "changed since the last start: model.moe.grouped_matmul: auto -> reference",
            "changed since the last start: model.moe.transport: auto -> gather",
            "changed since the last start: eval.every: 200 -> 7",
        }


def test_a_setting_is_an_execution_setting_by_its_whole_name():
    assert _is_execution("steps")
    assert _is_execution("mesh.ep")
    assert not _is_execution("steps_per_epoch")
    assert not _is_execution("model.recompute_policy")
    assert not _is_execution("mesh")


def test_a_start_that_is_refused_leaves_no_new_directory(config, tmp_path):
    with pytest.raises(KeyError), open_run(config):
        raise KeyError
    assert not (tmp_path / "run").exists()


def test_a_start_that_is_refused_leaves_a_directory_that_was_there(config, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(KeyError), open_run(config):
        raise KeyError
    assert (tmp_path / "run" / "lock").exists()


def test_a_start_that_is_refused_leaves_what_others_put_there(config, tmp_path):
    with open_run(config):
        (tmp_path / "run" / "notes").write_text("mine")
    assert (tmp_path / "run" / "notes").exists()


def test_a_lock_that_was_removed_before_it_was_taken_holds_nothing(config, tmp_path, monkeypatch):
    def remove(file, operation):
        (tmp_path / "run" / "lock").unlink()
        (tmp_path / "run").rmdir()

    monkeypatch.setattr("fcntl.flock", remove)
    with (
        pytest.raises(CheckpointError, match="was just removed by a start that was refused; start the same command again"),
        open_run(config),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("run_dir", "message"),
    [
        ("~nouser/x", "^run_dir=~nouser/x begins with the home of a user that does not exist here; write the whole path$"),
        ("x" * 300, r"x cannot be written \(File name too long\); .* or give another --run-dir$"),
    ],
    ids=["unknown user", "too long"],
)
def test_a_run_directory_that_cannot_be_one_is_refused(config, run_dir, message):
    with pytest.raises(CheckpointError, match=message), open_run(_replace(config, run_dir=run_dir)):
        pass


def test_another_config_is_refused_with_what_differs_and_the_ways_out(config):
    _start(config, steps=(2,))
    other = _replace(config, seed=5, steps=999, optim=_replace(config.optim, lr=1e-4))
    with pytest.raises(CheckpointError) as caught, open_run(other):
        pass
    message = str(caught.value)
    assert "seed: 0 -> 5" in message
    assert "optim.lr: 0.003 -> 0.0001" in message
    assert "steps" not in message.split("there -> here")[1].split("\ngive")[0]
    assert "--run-dir" in message
    assert "--resume changed" in message


def test_resume_changed_continues_and_lists_what_differs(config):
    _start(config, steps=(2,))
    with open_run(_replace(config, seed=5, resume="changed")) as run:
        assert run.step == 2
        assert run.notes[1:] == ("changed since the last start: seed: 0 -> 5",)


def test_resume_never_refuses_a_used_directory(config):
    _start(config, steps=(2,))
    with (
        pytest.raises(CheckpointError, match=r"resume=never, but .* is in use \(checkpoint 2\); give another --run-dir"),
        open_run(_replace(config, resume="never")),
    ):
        pass


def test_resume_never_takes_a_new_directory(config):
    with open_run(_replace(config, resume="never")) as run:
        assert run.step is None


def test_a_directory_that_is_no_run_is_refused_and_left_alone(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("...")
    with (
        pytest.raises(CheckpointError, match=r"is not empty \(thesis.tex, ...\) and holds no run; give an empty or new --run-dir"),
        open_run(config),
    ):
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_directory_is_refused(config, tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; remove it or give another --run-dir"), open_run(config):
        pass


def test_a_run_without_a_checkpoint_starts_again_and_its_metrics_are_dropped(config, tmp_path):
    _start(config)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with open_run(config) as run:
        assert run.step is None
        assert run.notes == (f"run in {run.path} stopped before its first checkpoint: starting again from step 0",)
        begin(run, config)
        assert run.metrics.read_text() == ""


def test_metrics_after_the_checkpoint_are_dropped(config, tmp_path):
    _start(config, steps=(2,))
    lines = [f'{{"kind": "train", "step": {step}}}\n' for step in (1, 2, 3)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    with open_run(config) as run:
        begin(run, config)
        assert run.metrics.read_text() == "".join(lines[:2])


def test_a_damaged_checkpoint_stops_the_run(config, tmp_path):
    _start(config, steps=(2,))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    (tmp_path / "run" / "checkpoints" / "2").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"), open_run(config):
        pass


def test_opening_changes_nothing_until_the_run_begins(config):
    _start(config, steps=(2,))
    changed = _replace(config, steps=999)
    with open_run(changed) as run:
        assert read_config(run.path) == config
        begin(run, changed)
        assert read_config(run.path) == changed


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 1234 on node7")
file.flush()
print(1, flush=True)
input()
"""


def test_a_second_process_is_refused_while_the_first_lives_and_not_after_it_is_killed(config, tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run" / "lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    process.stdout.readline()
    with pytest.raises(CheckpointError, match="in use by process 1234 on node7; stop that one first"), open_run(config):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with open_run(config) as run:
        assert f"process {os.getpid()} on " in (run.path / "lock").read_text()


def test_a_disk_that_refuses_is_named_with_the_way_out(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"run cannot be written \(No space left on device\); make room or fix"),
        writing(tmp_path / "run"),
    ):
        raise OSError(28, "No space left on device")
