"""`moejax show-schedule` as people type it."""

from pathlib import Path

import pytest

from moejax.cli.main import main


def test_the_table_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-schedule", "1f1b", "--ranks", "2", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "1f1b: 2 ranks, 3 microbatches, 5 ticks"
    assert out[3:5] == ["rank 0   F0   F1   F2B0 B1   B2", "rank 1   .    F0B0 F1B1 F2B2 ."]
    assert "ranks wait 25.0% of the time in lock step; 25.0% if none waited for the others' tick; 25.0% by the formula" in out[6]
    assert out[8] == "activations under way, rank by rank: 3, 1 microbatches"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "v_shaped", "zero_bubble"])
def test_every_schedule_is_shown_and_drawn(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "schedule.png"
    assert main(["show-schedule", name, "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert out.startswith(f"{name}: 4 ranks")
    assert str(picture) in err


def test_help_says_which_schedules_train(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["1f1b", "--help"]):
        assert main(["show-schedule", *words]) == 0
        assert "Training runs gpipe, 1f1b, interleaved, v_shaped; zero_bubble can be shown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["1f2b"], "schedule=1f2b is not one of gpipe, 1f1b"),
        (["1f1bb"], "did you mean 1f1b?"),
        (
            ["1f1b", "--virtual-stages", "2"],
            "schedule=1f1b has 1 stage on each rank, not virtual_stages=2; use virtual_stages=1, or schedule interleaved or v_shaped or",
        ),
        (["v_shaped", "--virtual-stages", "1"], "schedule=v_shaped has 2 stages on each rank, not virtual_stages=1; use virtual_stages=2"),
        (["interleaved", "--virtual-stages", "1"], "schedule=interleaved has 2 or more stages on each rank"),
        (["1f1b", "--ranks", "0"], "ranks=0 is below 1"),
        (["1f1b", "--picture", "x.bmp"], "picture=x.bmp is not a picture"),
        ([], "a schedule is missing; write it as in moejax show-schedule 1f1b"),
    ],
)
def test_wrong_words_get_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show-schedule", *words]) == 2
    assert sentence in capsys.readouterr().err
