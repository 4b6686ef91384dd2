"""What the subcommands share: their first word, a request for help, run directories, and the list of shipped configs."""

import ast
import dataclasses
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moejax.config import CONFIG_FILE, SYSTEM_REFERENCE, TrainConfig, load_config
from moejax.config.check import check
from moejax.config.load import config_folder, config_names
from moejax.errors import ConfigError

RUNS = Path("runs")
"""Where runs are written unless run_dir says otherwise."""

HELP = ("-h", "--help")

_PICTURES = (".png", ".pdf", ".svg")

HOW_TO_SET = "Settings are given as --name value, with - or _ between words; a switch without a value means True."


def split_subject(words: Sequence[str], kind: str, example: str) -> tuple[str, list[str], bool]:
    """Return the first word (a config or a run), the other words, and whether help is among them."""
    if not words or words[0].startswith("-"):
        given = f"{words[0]} stands where {kind} belongs" if words else f"{kind} is missing"
        raise ConfigError(f"{given}; write it as in {example}")
    rest = [word for word in words[1:] if word not in HELP]
    return words[0], rest, len(rest) < len(words) - 1


def find_run(name_or_path: str) -> Path:
    """Return the run directory that a path or a name below runs/ stands for."""
    for path in (Path(os.path.expanduser(name_or_path)), RUNS / name_or_path):
        if (path / CONFIG_FILE).is_file():
            return path
    known = sorted(path.parent.name for path in RUNS.glob(f"*/{CONFIG_FILE}"))
    near = difflib.get_close_matches(name_or_path, known, n=1)
    found = f"found: {', '.join(known)}" if known else f"there is none below {RUNS.resolve()}; moejax train quickstart makes one"
    raise ConfigError(
        f"run {name_or_path} is not a directory with {CONFIG_FILE}; " + (f"did you mean {near[0]}? ({found})" if near else found)
    )


def warn_of_reference(config: TrainConfig) -> None:
    """Say on stderr that results of a run with fixed routes are no results of a model."""
    if config.model.is_system_reference:
        print(f"warning: {SYSTEM_REFERENCE}", file=sys.stderr)


def split_options(words: Sequence[str], options: type) -> tuple[list[str], list[str]]:
    """The words that are options of a command, fields of that dataclass, with their values; and the settings of the config."""
    own, rest = [], []
    names = {field.name for field in dataclasses.fields(options)}
    current = rest
    for word in words:
        if word.startswith("--"):
            current = own if word[2:].partition("=")[0].replace("-", "_") in names else rest
        current.append(word)
    return own, rest


def compute_on_cpu() -> None:
    """Keep to CPUs; JAX's complaints about missing drivers help nobody. Call it before JAX starts."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def check_picture(name: str | None) -> None:
    """Refuse a file that no picture can be drawn into, before anything long begins."""
    if name is None:
        return
    path = Path(name)
    check(path.suffix in _PICTURES, f"picture={path} is not a picture that can be drawn; end it in {' or '.join(_PICTURES)}")
    check(path.absolute().parent.is_dir(), f"picture={path} is to be in a directory that does not exist; make {path.parent} first")


def shipped_configs() -> str:
    """One line for each shipped config: name and what it is; those that run on one device first, then by GPUs and size."""
    lines = []
    for name in sorted(config_names(), key=_size):
        tree = ast.parse((config_folder() / f"{name}.py").read_bytes())
        lines.append(f"  {name:<18}{first_line(ast.get_docstring(tree))}")
    return "\n".join(lines)


def _size(name: str) -> tuple[int, int, int]:
    """What orders shipped configs: equal for those of one device, which stay in the order of their names."""
    config = load_config(name)
    gpus, moe = config.mesh.num_devices, config.model.moe
    return (1, 0, 0) if gpus == 1 else (gpus, config.model.embed_dim, 0 if moe is None else moe.num_experts)


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]
