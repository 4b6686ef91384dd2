"""Runs in a process of their own that are told to stop, once, twice, or with kill -9."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moejax.checkpoint import committed_steps, read_manifest
from moejax.config import CheckpointConfig
from moejax.train import loop
from moejax.train.metrics import read_records
from moejax.train.signals import watch_signals
from tests.train.fakes import fake_config, install

PROGRAM = """
import sys
from moejax.config import CheckpointConfig, EvalConfig, LogConfig
from moejax.train import loop, signals
from tests.train.fakes import fake_config, install
signals.GRACE_S = {grace_s}
install(setattr, seconds={seconds}, eval_seconds=60)
sys.argv = ["moejax", "train", "quickstart"]
checkpoint, evaluation = CheckpointConfig(every={every}), EvalConfig(every={eval_every})
config = fake_config({run!r}, steps=100000, checkpoint=checkpoint, eval=evaluation, log=LogConfig(every=1))
sys.exit(loop.train(config))
"""


def _start(
    run: Path, *, seconds: float = 0.01, every: int = 100000, eval_every: int | None = None, grace_s: float = 5.0
) -> subprocess.Popen:
    program = PROGRAM.format(run=str(run), seconds=seconds, every=every, eval_every=eval_every, grace_s=grace_s)
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _read_until(process: subprocess.Popen, words: str) -> str:
    text = ""
    while words not in text:
        line = process.stdout.readline()
        assert line, text
        text += line
    return text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_signal_saves_the_step_it_came_in_and_says_how_to_go_on(tmp_path, number, code):
    process = _start(tmp_path / "run")
    _read_until(process, "step      5/")
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == code, rest
    step = committed_steps(tmp_path / "run" / "checkpoints")[-1]
    train = [record["step"] for record in read_records(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    assert train == list(range(1, step + 1))
    assert f"{number.name}: stopping after this step and saving; once more in 5 s or later to stop at once" in rest
    assert f"stopped by {number.name} after step {step} of 100000; the newest checkpoint is {step}" in rest
    assert "to go on   moejax train quickstart\n" in rest


def test_a_signal_ends_an_evaluation_and_the_steps_before_it_are_saved(tmp_path):
    process = _start(tmp_path / "run", eval_every=3)
    _read_until(process, "step      3/")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=40)
    assert process.returncode == 143, rest
    assert committed_steps(tmp_path / "run" / "checkpoints") == [3]


def test_a_second_signal_after_the_grace_ends_the_process_at_once(tmp_path):
    process = _start(tmp_path / "run", seconds=600, grace_s=1.0)
    _read_until(process, "compiling the step")
    process.send_signal(signal.SIGINT)
    _read_until(process, "stopping after this step")
    time.sleep(1.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert committed_steps(tmp_path / "run" / "checkpoints") == []


def test_signals_that_come_together_are_one_request_and_the_checkpoint_is_saved(tmp_path):
    """GNU timeout sends SIGTERM to the child and to its group: twice, at once."""
    process = _start(tmp_path / "run", seconds=0.5)
    _read_until(process, "step      1/")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.01)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 143, rest
    assert rest.count("stopping after this step") == 1
    assert committed_steps(tmp_path / "run" / "checkpoints")[-1] >= 1


def test_a_run_killed_while_it_saves_resumes_and_has_every_step_once(tmp_path, monkeypatch):
    process = _start(tmp_path / "run", every=3)
    _read_until(process, "checkpoint saved")
    process.kill()
    process.communicate()
    kept = committed_steps(tmp_path / "run" / "checkpoints")[-1]
    install(monkeypatch.setattr)
    config = fake_config(tmp_path / "run", steps=kept + 5, checkpoint=CheckpointConfig(every=3))
    assert loop.train(config) == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, kept + 6))
    manifest = read_manifest(tmp_path / "run" / "checkpoints", kept + 5)
    assert manifest["tokens_seen"] == (kept + 5) * 16
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))


def test_a_signal_between_start_and_first_step_stops_without_a_checkpoint(tmp_path, monkeypatch, capsys):
    install(monkeypatch.setattr)
    compile_step = loop._compile

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return compile_step(*args)

    monkeypatch.setattr(loop, "_compile", interrupted)
    config = fake_config(tmp_path / "run")
    assert loop.train(config) == 143
    assert "stopped by SIGTERM after step 0 of 12; there is no checkpoint yet" in capsys.readouterr().out
    monkeypatch.setattr(loop, "_compile", compile_step)
    assert loop.train(dataclasses.replace(config)) == 0


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with watch_signals(print):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def work():
        with watch_signals(print) as stop:
            seen.append((stop.signal, stop.exit_code))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, 0)]
