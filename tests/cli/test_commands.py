"""What each subcommand hands to the library, with the library replaced."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moejax.cli.main import main
from moejax.config import CONFIG_FILE, SYSTEM_REFERENCE, EvalConfig, MeshConfig, from_json, load_config, to_json

Calls = list[dict[str, Any]]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of tiny_cpu in ./runs, the working directory being a temporary one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "tiny_cpu"
    path.mkdir(parents=True)
    (path / CONFIG_FILE).write_text(to_json(load_config("tiny_cpu", ["--mesh.ep", "2"])))
    return path


def replaced(monkeypatch: pytest.MonkeyPatch, module: str, function: str, result: Any) -> Calls:
    """Put a module in place whose one function records its arguments."""
    calls: Calls = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append({"args": args} | kwargs)
        return result

    stand_in = ModuleType(module)
    setattr(stand_in, function, record)
    monkeypatch.setitem(sys.modules, module, stand_in)
    return calls


def test_train_makes_the_devices_says_so_and_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = replaced(monkeypatch, "moejax.train.loop", "train", 3)
    assert main(["train", "tiny_cpu", "--mesh.dp", "2", "--mesh.ep", "4", "--profile"]) == 3
    assert calls == [{"args": (load_config("tiny_cpu", ["--mesh.dp", "2", "--mesh.ep", "4", "--profile"]),)}]
    assert capsys.readouterr().out == "using 8 fake CPU devices for mesh.dp=2 x mesh.ep=4\n"


def test_train_refuses_a_mesh_that_jax_can_no_longer_have(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = replaced(monkeypatch, "moejax.train.loop", "train", 0)
    words = ["train", "tiny_cpu", "--mesh.dp", "16", "--batch-size", "16"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: 16 CPU devices are needed, but JAX already runs with 8")
    assert calls == []


def test_eval_takes_the_mesh_and_text_of_the_run_unless_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = replaced(monkeypatch, "moejax.eval", "run_eval", {"eval/loss": 1.5})
    assert main(["eval", "tiny_cpu"]) == 0
    assert main(["eval", str(run_dir), "--step", "5", "--mesh.ep", "4", "--eval.sequences", "8", "--eval.batch-size", "4"]) == 0
    assert calls == [
        {"args": (Path("runs/tiny_cpu"),), "step": None, "mesh": MeshConfig(ep=2), "eval": EvalConfig(every=5, sequences=16)},
        {"args": (run_dir,), "step": 5, "mesh": MeshConfig(ep=4), "eval": EvalConfig(every=5, sequences=8, batch_size=4)},
    ]


def test_eval_prints_results(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replaced(monkeypatch, "moejax.eval", "run_eval", {"eval/loss": 1.5, "eval/tokens": 512})
    assert main(["eval", "tiny_cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["eval/loss    1.5000", "eval/tokens  512"]


@pytest.mark.parametrize("assignment", ["learned", "uniform", "random"])
def test_eval_and_generate_warn_of_a_run_whose_routes_are_not_learned(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], assignment: str
) -> None:
    replaced(monkeypatch, "moejax.eval", "run_eval", {"eval/loss": 1.5})
    replaced(monkeypatch, "moejax.generate", "run_generate", ["ROMEO: hark"])
    (run_dir / CONFIG_FILE).write_text(to_json(load_config("tiny_cpu", ["--model.moe.router.assignment", assignment])))
    expected = "" if assignment == "learned" else f"warning: {SYSTEM_REFERENCE}\n"
    for words in (["eval", "tiny_cpu"], ["generate", "tiny_cpu", "--prompt", "ROMEO:"]):
        assert main(words) == 0
        assert capsys.readouterr().err == expected


def test_eval_has_no_setting_that_does_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "tiny_cpu", "--eval.every", "5"]) == 2
    assert "there is no setting eval.every" in capsys.readouterr().err
    assert main(["eval", "tiny_cpu", "--eval.sequences", "0"]) == 2
    assert "eval.sequences=0 is below 1" in capsys.readouterr().err


def test_generate_passes_every_setting(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = replaced(monkeypatch, "moejax.generate", "run_generate", ["ROMEO: hark"])
    assert main(["generate", "tiny_cpu", "--prompt", "ROMEO:"]) == 0
    assert capsys.readouterr().out == "ROMEO: hark\n"
    words = ["--max-new-tokens", "5", "--temperature", "0", "--top-p", "1", "--seed", "3", "--num-samples", "2", "--step", "10"]
    assert main(["generate", "tiny_cpu", "--prompt", "A b", "-- c", *words]) == 2, "a prompt that looks like a setting needs ="
    assert main(["generate", "tiny_cpu", "--prompt", "A b", "C", *words]) == 0
    defaults = {"max_new_tokens": 200, "temperature": 0.8, "top_p": 0.95, "seed": 0, "num_samples": 1, "step": None}
    given = {"max_new_tokens": 5, "temperature": 0.0, "top_p": 1.0, "seed": 3, "num_samples": 2, "step": 10}
    args = (Path("runs/tiny_cpu"),)
    assert calls == [{"args": args, "prompts": ["ROMEO:"]} | defaults, {"args": args, "prompts": ["A b", "C"]} | given]


def test_generate_numbers_several_texts(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replaced(monkeypatch, "moejax.generate", "run_generate", ["one", "two"])
    assert main(["generate", "tiny_cpu", "--prompt", "x", "--num-samples", "2"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2 ---\none\n--- 2 of 2 ---\ntwo\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], 'prompt is not given; say what to continue, as in --prompt "ROMEO:"'),
        (["--prompt", "x", "--top-p", "0"], "top_p=0.0 is not in (0, 1]; 0.95 is usual, 1 draws from all tokens"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0 is below 0; give a number >= 0"),
        (["--prompt", "x", "--max-tokens", "5"], "there is no setting max_tokens; did you mean --max-new-tokens?"),
    ],
)
def test_generate_refuses_what_cannot_work(run_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["generate", "tiny_cpu", *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_help_of_a_run_tells_the_settings(run_dir: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "tiny_cpu", "--help"]) == 0
    assert "Step of the checkpoint. None: the newest." in capsys.readouterr().out


def test_unknown_run_suggests_the_nearest(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "tiny_gpu"]) == 2
    assert capsys.readouterr().err == "error: run tiny_gpu is not a directory with config.json; did you mean tiny_cpu? (found: tiny_cpu)\n"


def test_show_config_prints_every_setting_and_marks_the_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", "tiny_cpu", "--mesh.ep", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.moe.num_experts", "8"] in lines
    assert ["mesh.ep", "2", "#", "config", "file:", "1"] in lines
    assert ["model.attention.window_pattern", "16", "-1"] in lines
    assert ["data.paths", "()"] in lines


def test_show_config_as_json_is_the_saved_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-config", "tiny_cpu", "--steps", "20", "--json"]) == 0
    text = capsys.readouterr().out
    assert from_json(text) == load_config("tiny_cpu", ["--steps", "20"])
    assert json.loads(text)["steps"] == 20
