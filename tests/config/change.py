"""Build a config with settings changed by dotted name, all at once and past the command line's own checks."""

import dataclasses
from typing import Any

from moejax.config import TrainConfig


def change(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """Return the config with every named setting replaced before anything is validated."""
    return _change(config, {tuple(name.split(".")): value for name, value in changes.items()})


def _change(config: Any, changes: dict[tuple[str, ...], Any]) -> Any:
    values = {path[0]: value for path, value in changes.items() if len(path) == 1}
    for group in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: value for path, value in changes.items() if len(path) > 1 and path[0] == group}
        values[group] = _change(getattr(config, group), inner)
    return dataclasses.replace(config, **values)
