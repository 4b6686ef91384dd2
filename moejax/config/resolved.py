"""The resolved config of a run as a dictionary or JSON, read back exactly, and the differences between two of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from moejax.config.settings import config_types, describe, fields, holds, item_type, options
from moejax.config.train import TrainConfig
from moejax.errors import ConfigError

CONFIG_FILE = "config.json"
"""Name of the resolved config inside a run directory."""

_VERSION_KEY = "config_version"
_VERSION = 1


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return nested plain dictionaries that JSON holds exactly: tuples as lists, the version of the format on top."""
    return {_VERSION_KEY: _VERSION} | _plain(config)


def from_dict(saved: dict[str, Any]) -> TrainConfig:
    """Return the config that to_dict was given.

    Raises:
        ConfigError: for another version, unknown or missing settings, wrong types, or values that break a rule.
    """
    version = saved.get(_VERSION_KEY)
    if version != _VERSION:
        raise ConfigError(f"{_VERSION_KEY}={version} of the saved config is not {_VERSION}; read it with the moejax that wrote it")
    return _build(TrainConfig, {key: value for key, value in saved.items() if key != _VERSION_KEY}, "")


def to_json(config: TrainConfig) -> str:
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(text: str) -> TrainConfig:
    try:
        saved = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the saved config is not JSON (line {error.lineno}: {error.msg}); restore it from a copy") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"the saved config is {type(saved).__name__} in JSON, not an object of settings; restore it from a copy")
    return from_dict(saved)


def read_config(run_dir: Path) -> TrainConfig:
    """Return the config that a run directory was trained with."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, so {run_dir} is not a run directory; give the directory that training wrote")
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the saved config is not UTF-8 text (byte {error.start}); restore it from a copy") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def on_any_device(config: TrainConfig) -> TrainConfig:
    """The same run with kernels and transport left to the device it finds itself on: a checkpoint is read elsewhere than it was made."""
    model = config.model
    attention = dataclasses.replace(model.attention, implementation="auto")
    moe = None if model.moe is None else dataclasses.replace(model.moe, transport="auto", grouped_matmul="auto")
    return dataclasses.replace(config, model=dataclasses.replace(model, attention=attention, moe=moe))


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """List the settings that differ between two configs of one class, as `model.moe.top_k: 2 -> 4`."""
    lines = []
    for name, _ in fields(type(old)):
        before, after = getattr(old, name), getattr(new, name)
        if dataclasses.is_dataclass(before) and type(before) is type(after):
            lines += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {before} -> {after}")
    return lines


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _build(config_class: type, saved: dict[str, Any], prefix: str) -> Any:
    hints = dict(fields(config_class))
    unknown = [prefix + name for name in saved if name not in hints]
    missing = [prefix + name for name in hints if name not in saved]
    if unknown or missing:
        parts = [f"{words} {', '.join(names)}" for words, names in (("unknown", unknown), ("missing", missing)) if names]
        raise ConfigError(
            f"the settings of the saved config are not those of this moejax: {'; '.join(parts)}; use the moejax that wrote it"
        )
    return config_class(**{name: _value(hints[name], saved[name], prefix + name) for name in hints})


def _value(hint: Any, saved: Any, name: str) -> Any:
    groups = config_types(hint)
    if groups and isinstance(saved, dict):
        return _build(groups[0], saved, f"{name}.")
    value = tuple(saved) if item_type(hint) is not None and isinstance(saved, list) else saved
    if not holds(hint, value):
        raise ConfigError(f"{name}={value!r} of the saved config is not {describe(hint)}; restore the file from a copy")
    return float(value) if float in options(hint) and type(value) is int and int not in options(hint) else value
