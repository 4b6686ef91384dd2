import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moejax
from moejax.config import TrainConfig, load_config
from moejax.config.load import config_folder
from moejax.errors import ConfigError

QUICKSTART = config_folder() / "quickstart.py"


def refusal(tmp_path: Path, source: str) -> str:
    """Message about a config file with this source, with the path cut off."""
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


def test_a_name_and_a_path_are_the_same_config() -> None:
    assert load_config("quickstart") == load_config(QUICKSTART) == load_config(str(QUICKSTART))


def test_overrides_are_applied() -> None:
    assert load_config("quickstart", ["--steps", "77"]).steps == 77


def test_unknown_name_suggests_the_nearest_and_lists_the_shipped() -> None:
    with pytest.raises(ConfigError, match=r"config quikstart does not exist; did you mean quickstart\? \(shipped: .*tiny_cpu"):
        load_config("quikstart")


def test_unknown_path_suggests_the_nearest_file() -> None:
    with pytest.raises(ConfigError, match=r"config .*quikstart\.py is not a file; did you mean .*quickstart\.py\?"):
        load_config(QUICKSTART.with_name("quikstart.py"))


def test_path_in_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config nowhere/mine\.py is not a file; give the path of a Python file"):
        load_config("nowhere/mine.py")


def test_installed_configs_are_found_inside_the_package(tmp_path: Path) -> None:
    package = Path(moejax.__file__).parent
    for part in ("config", "__init__.py", "errors.py"):
        copy = shutil.copytree if (package / part).is_dir() else shutil.copy
        (tmp_path / "moejax").mkdir(exist_ok=True)
        copy(package / part, tmp_path / "moejax" / part)
    (tmp_path / "moejax" / "configs").mkdir()
    shutil.copy(QUICKSTART, tmp_path / "moejax" / "configs" / "shipped.py")
    program = "from moejax.config import load_config; print(load_config('shipped').name)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "quickstart\n"


def test_file_with_a_syntax_error_is_named_with_the_line(tmp_path: Path) -> None:
    assert refusal(tmp_path, "x = 1\nx = = 2\n") == ", line 2: invalid syntax"


def test_file_whose_import_fails_is_named_with_the_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, '"""Doc."""\n\nimport no_such_module\n')
    assert message == ", line 3: ModuleNotFoundError: No module named 'no_such_module'"


def test_file_without_config_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "steps = 3\n") == " has no function config(); add `def config() -> TrainConfig` to it"


def test_config_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "\ndef config():\n    return {}\n")
    assert message == ", line 2: config() returned dict; it has to return a moejax.config.TrainConfig"


def test_broken_rule_in_a_file_is_named_with_the_line(tmp_path: Path) -> None:
    source = QUICKSTART.read_text()
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "moe=MoEConfig(" in text)
    message = refusal(tmp_path, re.sub(r"top_k=\d+", "top_k=99", source))
    assert message == f", line {line}: model.moe.top_k=99 exceeds model.moe.num_experts=8; lower top_k or add experts"


def test_unknown_argument_in_a_file_is_named_with_the_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, QUICKSTART.read_text().replace("top_k=", "topk="))
    assert "TypeError" in message
    assert "topk" in message


def test_value_of_the_wrong_type_in_a_file_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, re.sub(r"steps=\d+,", "steps=400.5,", QUICKSTART.read_text(), count=1))
    assert message == ": steps=400.5 is not a whole number; write one in config()"


def test_a_config_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for steps in (401, 402):
        path.write_text(re.sub(r"steps=\d+,", f"steps={steps},", QUICKSTART.read_text(), count=1))
        config = load_config(path)
        assert isinstance(config, TrainConfig)
        assert config.steps == steps
