"""TensorBoard and Weights & Biases get the numbers of logged steps; their packages are stood in for."""

import dataclasses
import sys
from types import ModuleType

import pytest

from moejax.config import EvalConfig, LogConfig
from moejax.train import loop
from tests.train.fakes import fake_config, install


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins that write down what they are asked to do."""
    calls = []

    class SummaryWriter:
        def __init__(self, directory, purge_step):
            calls.append(("open", directory, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append(("close",))

    class Run:
        def log(self, numbers):
            calls.append(numbers)

        def finish(self):
            calls.append("finish")

    def start(**settings):
        calls.append(settings)
        return Run()

    for name, content in (("tensorboardX", {"SummaryWriter": SummaryWriter}), ("wandb", {"init": start})):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in sys.modules)
    return calls


def test_tensorboard_gets_logged_steps_and_evaluations(packages, tmp_path, monkeypatch):
    install(monkeypatch.setattr)
    config = fake_config(tmp_path / "run", log=LogConfig(every=5, tensorboard=True), eval=EvalConfig(every=6))
    loop.train(config)
    assert packages[0] == ("open", str(tmp_path / "run" / "tensorboard"), 1)
    assert [call[2] for call in packages if call[0] == "train/loss"] == [1, 5, 10, 12]
    assert [call[2] for call in packages if call[0] == "eval/loss"] == [6, 12]
    assert packages[-1] == ("close",)
    packages.clear()
    loop.train(dataclasses.replace(config, steps=13))
    assert packages[0][2] == 13


def test_a_resumed_run_goes_on_in_the_same_wandb_run(packages, tmp_path, monkeypatch):
    install(monkeypatch.setattr)
    config = fake_config(tmp_path / "run", log=LogConfig(every=5, wandb_project="moe"))
    loop.train(config)
    first = packages[0]
    assert (first["project"], first["name"], first["resume"], first["config"]["steps"]) == ("moe", "quickstart", "allow", 12)
    assert [numbers["step"] for numbers in packages[1:-1] if "train/loss" in numbers] == [1, 5, 10, 12]
    assert packages[-1] == "finish"
    packages.clear()
    loop.train(dataclasses.replace(config, steps=13))
    assert packages[0]["id"] == first["id"]
