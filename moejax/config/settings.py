"""The settings of nested dataclass configs as a flat list with dotted names, and the few types a setting can have."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Setting:
    name: str
    """Dotted name with underscores, such as model.moe.num_experts."""
    hint: Any
    """Type annotation of the field."""
    value: Any
    """Value in this config."""


def settings(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a config, those of a group before its subgroups. An absent group, such as moe=None, is one setting."""
    groups = []
    for name, hint in fields(type(config)):
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            groups.append((name, value))
        else:
            yield Setting(prefix + name, hint, value)
    for name, group in groups:
        yield from settings(group, f"{prefix}{name}.")


def possible_names(config_class: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings that some config of the class can have."""
    for name, hint in fields(config_class):
        groups = config_types(hint)
        if not groups:
            yield prefix + name
        for group in groups:
            yield from possible_names(group, f"{prefix}{name}.")


def fields(config_class: type) -> list[tuple[str, Any]]:
    """Name and type of each field."""
    hints = typing.get_type_hints(config_class)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(config_class)]


def config_types(hint: Any) -> list[type]:
    """The dataclasses that a field may hold; empty for a plain setting."""
    return [option for option in options(hint) if dataclasses.is_dataclass(option)]


def options(hint: Any) -> tuple[Any, ...]:
    """Members of a union, or the type itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)


def choices(hint: Any) -> tuple[str, ...]:
    """The allowed words of a Literal; empty for other types."""
    return tuple(word for option in options(hint) if typing.get_origin(option) is Literal for word in typing.get_args(option))


def item_type(hint: Any) -> Any:
    """Item type of a tuple setting, None for other types."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def describe(hint: Any) -> str:
    """A type in words."""
    item = item_type(hint)
    if item is not None:
        return f"a tuple of {describe(item).removeprefix('a ')}s"
    if choices(hint):
        return f"one of {', '.join(choices(hint))}"
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", types.NoneType: "None"}
    return " or ".join(words.get(option, getattr(option, "__name__", str(option))) for option in options(hint))


def holds(hint: Any, value: Any) -> bool:
    """Whether a value is of the setting's type. A whole number may stand for a number; infinities and NaN are no numbers."""
    item = item_type(hint)
    if item is not None:
        return isinstance(value, tuple) and all(holds(item, one) for one in value)
    if isinstance(value, str):
        return value in choices(hint) if choices(hint) else str in options(hint)
    if isinstance(value, float):
        return float in options(hint) and math.isfinite(value)
    if type(value) is int:
        return int in options(hint) or float in options(hint)
    return type(value) in options(hint)
