"""`moejax plan` as people type it."""

import json
from pathlib import Path

import pytest

from moejax.cli.main import main


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets both; after a test they are what they were."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "eight_layers", "--gpu", "b300", "--num-gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert "eight_layers on 8 x b300: mesh.dp=1 x mesh.ep=8" in out
    assert "24.31B parameters, 3.17B of them for one token" in out
    assert "fits: " in out
    assert "not in these figures: the CUDA context" in out


def test_a_plan_that_does_not_fit_ends_with_one_and_says_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "eight_layers", "--gpu=h200", "--model.moe.num-experts", "128"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "does not fit: " in out
    suggested = out.rpartition("nearest settings that fit:\n")[2].strip().splitlines()[0].partition("  ")[0]
    assert main([*words, *suggested.split()]) == 0


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "eight_layers", "--gpu", "b300", "--json", "--mesh.dp", "2", "--batch-size", "512"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["gpu"], plan["num_gpus"], plan["fits"]) == ("b300", 16, True)
    assert sum(plan["memory"].values()) == plan["total_bytes"] == plan["usable_bytes"] - plan["margin_bytes"]
    assert plan["compiled"] is None
    assert plan["suggestions"] == []


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    assert main(["plan", "eight_layers", "--gpu", "h200", "--picture", str(picture), "--model.moe.num-experts", "128"]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in capsys.readouterr().err


def test_parts_that_cannot_run_yet_are_named_and_the_rest_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "ultra_256e", "--gpu", "b300", "--compile", "--mesh.schedule", "zero_bubble"]) in (0, 1)
    out, err = capsys.readouterr()
    assert "model.precision=mxfp8 cannot run yet" in out
    assert "2,379.5" in out
    assert "nothing is compiled: there is no step yet" in err


def test_help_of_a_config_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "eight_layers", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--gpu NAME" in out
    assert "--model.moe.num-experts" in out
    assert "None" not in out.partition("Settings are given")[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eight_layers"], "gpu is not given; say which GPUs, as in moejax plan eight_layers --gpu b300"),
        (["eight_layers", "--gpu", "v100"], "gpu=v100 is not in the table; use one of h100, h200, b200, b300"),
        (["eight_layers", "--gpu", "b300", "--num-gpus", "16"], "num_gpus=16 is not mesh.dp=1 x mesh.ep=8 = 8; add --mesh.dp 2"),
        (["eight_layers", "--gpu", "b300", "--num-gpus", "0"], "num_gpus=0 is below 1"),
        (
            ["eight_layers", "--gpu", "b300", "--num-gpus", "many"],
            "num_gpus=many is not a whole number or None; give it as in --num-gpus 8",
        ),
        (["eight_layers", "--gpu", "b300", "--mesh.dp", "2", "--microbatches", "64"], "such as 1024, or microbatches=32"),
        (
            ["eight_layers", "--gpu", "b300", "--mesh.pp", "7", "--mesh.schedule", "2f2b"],
            "mesh.schedule=2f2b is not one of ",
        ),
        (["eight_layers", "--gpu", "b300", "--mesh.epp", "8"], "there is no setting mesh.epp"),
        (["eight_layers", "--gpu", "b300", "--mesh.ep", "7"], "mesh.ep=7 does not divide model.moe.num_experts=64"),
        (["quickstart", "--gpu", "b300"], "model.moe.grouped_matmul=auto with model.dtype=float32"),
        (["eight_layers", "--gpu", "b300", "--picture", "plan.xyz"], "picture=plan.xyz"),
        (["eight_layers", "--gpu", "b300", "--picture", "/nowhere/plan.png"], "picture=/nowhere/plan.png"),
    ],
)
def test_wrong_words_get_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert sentence in capsys.readouterr().err
