"""The command as a user meets it: help, errors and exit codes. Nothing here starts JAX."""

import os
import resource
import subprocess
import sys

import pytest

from moejax.cli import main as entry
from moejax.cli.main import main
from moejax.config.load import config_names
from moejax.errors import CheckpointError, ConfigError, DataError, TrainingError

JAX_BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "numpy", "flax", "optax", "orbax"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
from moejax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The only line on stderr of a refused command; the exit code is 2 and nothing is on stdout."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err.removeprefix("error: ").strip()


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["show-config", "quickstart"], ["train", "quickstart", "--help"]])
def test_help_answers_within_a_second_and_without_jax(words: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", JAX_BLOCKED, *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time, which other tests on the machine do not stretch much.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_overview_lists_commands_examples_and_configs(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    for part in ("train ", "eval ", "generate ", "show-config ", "moejax train quickstart", "tiny_cpu  ", "runs/quickstart"):
        assert part in text


def test_overview_lists_configs_of_one_device_first_and_the_others_by_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.partition("Configs that come with moejax:\n")[2].splitlines()
    names = [line.split()[0] for line in lines]
    assert sorted(names) == config_names()
    assert names.index("quickstart") < names.index("tiny_cpu") < names.index("eight_layers") < names.index("tiny_64e")
    assert names[-4:] == ["medium_128e", "large_128e", "ultra_128e", "ultra_256e"]


@pytest.mark.parametrize("command", entry.COMMANDS)
def test_each_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    subject = {"plan": "eight_layers", "show-schedule": "1f1b", "checkpoint": "inspect quickstart"}.get(command, "quickstart")
    assert f"  moejax {command} {subject}" in text


def test_help_of_a_config_tells_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--mesh.ep", "4", "--help"]) == 0
    text = capsys.readouterr().out
    assert "for a laptop" in text
    assert "--model.moe.num-experts INT" in text
    assert "model.moe.router options" in text
    assert "(default: 4)" in text.partition("--mesh.ep INT")[2].partition("--")[0]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moejax 0.")


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    message = error(capsys, "trian", "quickstart")
    names = "train, plan, verify, eval, generate, checkpoint, show-config, show-schedule"
    assert message == f"there is no command trian among {names}; did you mean moejax train?"
    assert error(capsys, "--quiet").endswith("moejax --help explains them")


def test_commands_may_be_spelled_with_an_underscore(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show_config", "tiny_cpu"]) == 0
    assert "model.embed_dim" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "show-config"])
def test_missing_or_unknown_config_is_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert error(capsys, command) == f"a config is missing; write it as in moejax {command} quickstart"
    assert error(capsys, command, "--steps", "3").startswith("--steps stands where a config belongs; write it as in")
    assert "did you mean quickstart?" in error(capsys, command, "quikstart")


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_missing_or_unknown_run_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert error(capsys, command).startswith("a run is missing; write it as in moejax")
    message = error(capsys, command, "nothing")
    assert message.startswith("run nothing is not a directory with config.json; there is none below")
    assert message.endswith("moejax train quickstart makes one")


def test_wrong_settings_are_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    message = error(capsys, "train", "quickstart", "--model.moe.top-k", "99")
    assert message == "model.moe.top_k=99 exceeds model.moe.num_experts=8; lower top_k or add experts"
    assert "did you mean --mesh.ep?" in error(capsys, "train", "quickstart", "--mesh.eep", "2")
    assert "did you mean softmax?" in error(capsys, "train", "quickstart", "--model.moe.router.gating", "softmx")


@pytest.mark.parametrize(
    ("problem", "code"),
    [(ConfigError("x"), 2), (DataError("x"), 2), (CheckpointError("x"), 1), (TrainingError("x"), 1)],
)
def test_exit_code_follows_the_kind_of_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, problem: Exception, code: int
) -> None:
    def fail(words: list[str]) -> int:
        raise problem

    monkeypatch.setattr(entry.train, "run", fail)
    assert main(["train", "quickstart"]) == code
    assert capsys.readouterr().err == "error: x\n"


def test_unexpected_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(entry.train, "run", fail)
    with pytest.raises(KeyError, match="a bug"):
        main(["train", "quickstart"])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -c 'from moejax.cli.main import main; main()' train quickstart --help"
    program = command.replace("main()'", "import sys; main(sys.argv[1:])'")
    done = subprocess.run(f"{program} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: moejax train quickstart")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--mesh.schedule", "1f1bb"],
            "mesh.schedule=1f1bb is not one of gpipe, 1f1b, interleaved, v_shaped, zero_bubble, auto; did you mean 1f1b?",
        ),
        (
            ["--mesh.schedule", "1f1b", "--mesh.virtual-stages", "2"],
            "mesh.schedule=1f1b has 1 stage on each rank, not mesh.virtual_stages=2; use mesh.virtual_stages=1, "
            "or schedule interleaved or v_shaped",
        ),
        (
            ["--mesh.schedule", "zero_bubble"],
            "mesh.schedule=zero_bubble can be planned (moejax plan) but not run yet; use --mesh.schedule auto",
        ),
    ],
)
def test_a_schedule_that_a_run_cannot_have_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert error(capsys, "train", "eight_layers", "--mesh.pp", "2", *words) == sentence
