"""A config by path or by name: a Python file with `def config() -> TrainConfig`."""

import difflib
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from moejax.config.overrides import apply_overrides
from moejax.config.settings import describe, holds, settings
from moejax.config.train import TrainConfig
from moejax.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def load_config(name_or_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the config of a file, with settings changed as on the command line.

    Args:
        name_or_path: a path such as configs/quickstart.py, or the name of a shipped config such as quickstart.
        overrides: command-line words, such as ["--mesh.ep", "8"]. They are applied together and validated once.

    Raises:
        ConfigError: if there is no such config, its file does not work, or a setting is wrong.
    """
    return apply_overrides(_call_config(find_config(name_or_path)), overrides)


def config_names() -> list[str]:
    """Names of the shipped configs."""
    return sorted(path.stem for path in config_folder().glob("*.py"))


def config_folder() -> Path:
    """Folder of the shipped configs: inside an installed package, beside the package in a clone."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def find_config(name_or_path: str | Path) -> Path:
    """Return the file that a path or name stands for."""
    text = str(name_or_path)
    if "/" in text or "\\" in text or text.endswith(".py"):
        path = Path(os.path.expanduser(text))  # the text itself where there is no such home
        if path.is_file():
            return path
        beside = [str(other) for other in sorted(path.parent.glob("*.py"))]
        raise ConfigError(f"config {text} is not a file; {_suggest(text, beside)}")
    path = config_folder() / f"{text}.py"
    if path.is_file():
        return path
    names = config_names()
    raise ConfigError(f"config {text} does not exist; {_suggest(text, names)} (shipped: {', '.join(names)}; or give a path ending in .py)")


def _suggest(text: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "give the path of a Python file with config(), or the name of a shipped one"


def _call_config(path: Path) -> TrainConfig:
    module = ModuleType(f"config_file_{path.stem}")
    module.__file__ = str(path)
    _run(path, lambda: exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__))
    function = getattr(module, "config", None)
    if not callable(function):
        raise ConfigError(f"{path} has no function config(); add `def config() -> TrainConfig` to it")
    result = _run(path, function)
    if not isinstance(result, TrainConfig):
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", 1)
        raise ConfigError(f"{path}, line {line}: config() returned {type(result).__name__}; it has to return a moejax.config.TrainConfig")
    for setting in settings(result):
        if not holds(setting.hint, setting.value):
            raise ConfigError(f"{path}: {setting.name}={setting.value!r} is not {describe(setting.hint)}; write one in config()")
    return result


def _run(path: Path, action: Callable[[], object]) -> object:
    """Run a piece of a config file; whatever goes wrong in it is reported with the file and line."""
    try:
        return action()
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}, line {_line(path, error)}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{path}, line {_line(path, error)}: {type(error).__name__}: {error}") from error


def _line(path: Path, error: BaseException) -> int:
    """Last line of the file on the way to the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines and lines[-1] else 1
