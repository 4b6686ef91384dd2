"""Whole runs of the loop around a fake step: fresh, resumed, finished, stopped, failing, profiled."""

import dataclasses
import json
import logging
import shutil
import sys

import jax
import pytest

from moejax.checkpoint import committed_steps, read_manifest
from moejax.config import SYSTEM_REFERENCE, EvalConfig, LogConfig, read_config
from moejax.data import Dataset
from moejax.errors import CheckpointError, ConfigError, TrainingError
from moejax.train import loop
from moejax.train.metrics import read_records
from moejax.train.run_dir import run_path
from tests.config.change import change
from tests.train.fakes import fake_config, install


@pytest.fixture
def config(tmp_path):
    return fake_config(tmp_path / "run")


def _records(config, kind):
    return [record for record in read_records(run_path(config) / "metrics.jsonl") if record["kind"] == kind]


def _losses(config):
    return {record["step"]: record["train/loss"] for record in _records(config, "train")}


def test_a_run_leaves_checkpoints_metrics_settings_and_a_picture(config, monkeypatch, tmp_path, capsys):
    install(monkeypatch.setattr, is_drawn=True)
    assert loop.train(config) == 0
    run = tmp_path / "run"
    assert committed_steps(run / "checkpoints") == [8, 12]
    manifest = read_manifest(run / "checkpoints", 12)
    assert (manifest["tokens_seen"], manifest["samples_seen"]) == (12 * 2 * 8, 24)
    assert manifest["config"]["name"] == "quickstart"
    assert read_config(run) == config
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")
    assert list(_losses(config)) == list(range(1, 13))
    assert [record["step"] for record in _records(config, "train") if "speed/step_s" in record] == [1, 3, 6, 9, 12]
    assert [record["step"] for record in _records(config, "save")] == [4, 8, 12]
    start = _records(config, "start")[0]
    assert start["devices"] == 1
    assert start["unigram_entropy"] == pytest.approx(3.3, abs=0.1)
    out = capsys.readouterr().out
    for words in (
        "new run in",
        "1 x cpu, mesh.dp=1 x mesh.ep=1",
        "parameters",
        "shakespeare",
        "compiled in",
        "step 12/12",
        "finished   12 steps",
        "moejax eval",
        "--steps 24",
    ):
        assert words in out


@pytest.mark.parametrize("assignment", ["learned", "uniform", "random"])
def test_a_run_whose_routes_are_not_learned_begins_with_a_warning(config, monkeypatch, capsys, assignment):
    install(monkeypatch.setattr)
    loop.train(change(config, {"model.moe.router.assignment": assignment}))
    out = capsys.readouterr().out
    assert (f"warning    {SYSTEM_REFERENCE}\n" in out) == (assignment != "learned")


def test_a_run_resumed_after_the_last_checkpoint_was_lost_repeats_the_same_steps(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr)
    loop.train(config)
    straight = _losses(config)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    loop.train(config)
    assert _losses(config) == straight
    assert [record["step"] for record in _records(config, "start")] == [0, 8]
    assert committed_steps(tmp_path / "run" / "checkpoints") == [8, 12]


def test_a_finished_run_says_so_and_more_steps_continue_it(config, monkeypatch, capsys):
    install(monkeypatch.setattr)
    loop.train(config)
    assert loop.train(config) == 0
    assert "this run has finished its 12 steps; raise steps to continue it, for example --steps 24" in capsys.readouterr().out
    assert loop.train(dataclasses.replace(config, steps=14)) == 0
    assert list(_losses(config)) == list(range(1, 15))
    assert "steps: 12 -> 14" in capsys.readouterr().out


def test_another_batch_size_goes_on_with_the_next_sequence(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr)
    loop.train(dataclasses.replace(config, steps=4))
    asked, sequences = [], Dataset.sequences
    monkeypatch.setattr(Dataset, "sequences", lambda self, first, count: asked.append((first, count)) or sequences(self, first, count))
    loop.train(dataclasses.replace(config, steps=6, batch_size=4, resume="changed"))
    assert [first for first, count in asked if count == 4][-2:] == [8, 12]
    manifest = read_manifest(tmp_path / "run" / "checkpoints", 6)
    assert (manifest["samples_seen"], manifest["tokens_seen"]) == (16, 16 * 8)


@pytest.mark.parametrize("is_resumed", [False, True], ids=["fresh", "resumed"])
def test_the_step_is_compiled_once(config, monkeypatch, caplog, is_resumed):
    install(monkeypatch.setattr)
    if is_resumed:
        loop.train(dataclasses.replace(config, steps=6))
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        loop.train(dataclasses.replace(config, eval=EvalConfig(every=5)))
    compiled = [record for record in caplog.records if "Finished XLA compilation of jit(train_step)" in record.getMessage()]
    assert len(compiled) == 1


def test_evaluations_are_made_on_time_and_at_the_end(config, monkeypatch, capsys):
    install(monkeypatch.setattr)
    loop.train(dataclasses.replace(config, eval=EvalConfig(every=5)))
    found = {record["step"]: record["eval/loss"] for record in _records(config, "eval")}
    assert found == {5: pytest.approx(1.95), 10: pytest.approx(1.9), 12: pytest.approx(1.88)}
    assert "step 5: held-out loss 1.9500 on 1,000 tokens" in capsys.readouterr().out


def test_single_bad_steps_are_skipped_and_recorded(config, monkeypatch, capsys):
    install(monkeypatch.setattr, bad_steps=(3, 7))
    assert loop.train(config) == 0
    assert [step for step, loss in _losses(config).items() if loss is None] == [3, 7]
    assert "skipped 2" in capsys.readouterr().out


def test_five_bad_steps_in_a_row_end_the_run_and_nothing_is_saved_after_them(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr, bad_steps=(5, 6, 7, 8, 9))
    with pytest.raises(TrainingError, match="steps 5 to 9"):
        loop.train(dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=10)))
    assert committed_steps(tmp_path / "run" / "checkpoints") == []
    assert _losses(config)[9] is None


def test_with_debug_nans_the_first_bad_step_ends_the_run(config, monkeypatch):
    def stop(step, config, mesh):
        def checked(state, batch):
            state, metrics = step(state, batch)
            if not metrics["optim/finite"]:
                raise TrainingError("it begins there")
            return state, metrics

        return checked

    install(monkeypatch.setattr, bad_steps=(3,))
    monkeypatch.setattr(loop, "stop_where_not_finite", stop)
    with pytest.raises(TrainingError, match="it begins there"):
        loop.train(dataclasses.replace(config, debug_nans=True))
    assert 3 not in _losses(config)


def test_broken_weights_are_never_saved(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr, broken_weights_after=5)
    with pytest.raises(TrainingError, match=r"weights are not finite after step 8, so they are not saved; the newest checkpoint is 4"):
        loop.train(config)
    assert committed_steps(tmp_path / "run" / "checkpoints") == [4]


def test_a_held_out_loss_that_is_not_finite_is_recorded_as_null(config, monkeypatch, tmp_path, capsys):
    install(monkeypatch.setattr, eval_loss=float("nan"))
    assert loop.train(dataclasses.replace(config, eval=EvalConfig(every=4))) == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["eval/loss"] for record in records if record["kind"] == "eval"] == [None] * 3
    assert "held-out loss nan" in capsys.readouterr().out


def test_a_save_that_fails_in_the_background_stops_the_run(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr, seconds=0.05)
    monkeypatch.setattr(
        "moejax.checkpoint.format.describe_files", lambda directory: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(CheckpointError, match="checkpoint 4 could not be written"):
        loop.train(dataclasses.replace(config, steps=1000))
    assert 4 <= max(_losses(config)) < 100


def test_a_damaged_checkpoint_stops_the_start(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr)
    loop.train(dataclasses.replace(config, steps=4))
    for path in (tmp_path / "run" / "checkpoints" / "4" / "arrays" / "d").iterdir():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint .*4 cannot be read"):
        loop.train(config)
    assert list(_losses(config)) == [1, 2, 3, 4]


def test_profile_writes_a_trace(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr)
    loop.train(dataclasses.replace(config, profile=True, log=LogConfig(every=3, profile_start=2, profile_steps=3)))
    traces = list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1
    assert traces[0].stat().st_size > 1000


def test_a_profile_beyond_the_end_is_refused(config, monkeypatch):
    install(monkeypatch.setattr)
    with pytest.raises(ConfigError, match=r"log\.profile_start=11 and log\.profile_steps=3 needs 14 steps, but 12 are left"):
        loop.train(dataclasses.replace(config, profile=True, log=LogConfig(profile_start=11)))


@pytest.mark.parametrize(
    ("log", "package", "extra"),
    [(LogConfig(tensorboard=True), "tensorboardX", "tensorboard"), (LogConfig(wandb_project="p"), "wandb", "wandb")],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_extra_is_refused_by_its_name(config, monkeypatch, log, package, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"needs the package {package}, which is not installed; pip install 'moejax\[{extra}\]'"):
        loop.train(dataclasses.replace(config, log=log))


def test_the_resume_command_is_the_one_that_was_typed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moejax", "train", "quickstart", "--name", "my run"])
    assert loop._command() == "moejax train quickstart --name 'my run'"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert loop._command(9) == "the same command with --steps 9"


@pytest.mark.parametrize("words", [["--steps", "5"], ["--steps=5"], []])
def test_the_command_for_more_steps_names_them_once(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/moejax", "train", "quickstart", *words, "--seed", "1"])
    assert loop._command(10) == "moejax train quickstart --seed 1 --steps 10"


def test_metrics_are_valid_json_line_by_line(config, monkeypatch, tmp_path):
    install(monkeypatch.setattr, bad_steps=(2,))
    loop.train(config)
    for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
