"""Command-line words such as `--model.moe.num-experts 64` applied to a frozen dataclass with tyro.

tyro converts the values and writes the help. The words are checked here first, because a message should name the setting,
its value, the rule and the way out in one sentence, and because tyro's own error boxes hide the message of a ConfigError.
"""

import contextlib
import difflib
import io
from collections.abc import Iterator, Sequence
from typing import Any

from moejax.config.settings import Setting, choices, describe, holds, item_type, options, possible_names, settings
from moejax.errors import ConfigError


def apply_overrides[T](config: T, words: Sequence[str]) -> T:
    """Return the config with the settings in the words changed, all at once, so only the result has to be valid.

    Raises:
        ConfigError: for an unknown setting, a value of the wrong type, or a result that breaks a rule.
    """
    if not words:
        return config
    arguments: list[str] = []
    for name, values in _split(words):
        setting = _find(config, name, values)
        if bool in options(setting.hint) and not values:
            values = ["True"]
        _check_values(setting, values)
        arguments += [f"--{name}={values[0]}"] if item_type(setting.hint) is None else [f"--{name}", *values]
    hidden = io.StringIO()
    try:
        with contextlib.redirect_stderr(hidden):
            return _tyro(config, arguments, prog="", description="")
    except SystemExit as stopped:
        raise _cause(stopped, hidden.getvalue()) from None


def print_help(config: Any, *, prog: str, description: str) -> None:
    """Print all settings of a config in groups, with their meaning and their value in it."""
    with contextlib.suppress(SystemExit):
        _tyro(config, ["--help"], prog=prog, description=description)


def _tyro[T](config: T, arguments: list[str], *, prog: str, description: str) -> T:
    import tyro

    # A group that may be None is no subcommand; a switch reads True or False, as messages and the saved config spell it.
    markers = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    return tyro.cli(type(config), default=config, args=arguments, prog=prog, description=description, config=markers)


def _split(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted name with underscores, values) for each option among the words."""
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    if words and starts[:1] != [0]:
        raise ConfigError(f"{words[0]} is not a setting; settings look like --steps 100, with the name first")
    for start, end in zip(starts, [*starts, len(words)][1:], strict=True):
        name, equals, value = words[start][2:].partition("=")
        yield name.replace("-", "_"), ([value] if equals else []) + list(words[start + 1 : end])


def _find(config: Any, name: str, values: list[str]) -> Setting:
    """Return the setting of that name, or explain why there is none. values: what is to be set, for the explanation."""
    known = {setting.name: setting for setting in settings(config)}
    possible = list(possible_names(type(config)))
    members = [other for other in possible if other.startswith(f"{name}.")]
    if members:
        meant = [other for other in members if other in known and values and values[0] in choices(known[other].hint)]
        if meant:
            raise ConfigError(f"{name} is a group of settings; did you mean {_option(meant[0])} {values[0]}?")
        raise ConfigError(f"{name} is a group of settings; set its members, such as {_option(members[0])}, or change it in the config file")
    if name in known:
        return known[name]
    if name in possible:
        absent = next(other for other in known if name.startswith(f"{other}."))
        raise ConfigError(f"{name} cannot be set: this config has {absent}=None; give {absent} in the config file, or take another config")
    raise ConfigError(f"there is no setting {name}; {_nearest(name, list(known))}")


def _nearest(name: str, known: Sequence[str]) -> str:
    """Suggest settings by the whole dotted name, and by the last word for a forgotten group."""
    by_last = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = by_last[:3] or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not near:
        lasts = [other.rpartition(".")[2] for other in known]
        close = difflib.get_close_matches(name.rpartition(".")[2], lasts, n=1, cutoff=0.7)
        near = [other for other in known if other.rpartition(".")[2] in close]
    return f"did you mean {' or '.join(map(_option, near))}?" if near else "--help lists all settings"


def _check_values(setting: Setting, values: list[str]) -> None:
    """Refuse values that are not of the setting's type, in words."""
    item = item_type(setting.hint)
    given = " ".join(values)
    if item is None and len(values) != 1:
        what = "needs a value" if not values else f"takes one value, not {len(values)} ({given})"
        raise ConfigError(f"{setting.name} {what}; give {describe(setting.hint)}, as in {_example(setting)}")
    for value in values:
        hint = setting.hint if item is None else item
        if not any(holds(hint, read) for read in _readings(value)):
            raise ConfigError(f"{setting.name}={value} is not {describe(hint)}; {_way_out(setting, value)}")


def _readings(text: str) -> Iterator[Any]:
    """Yield what a word can be read as."""
    yield text
    yield from ({"True": True, "False": False, "None": None}[word] for word in ("True", "False", "None") if word == text)
    for number in (int, float):
        with contextlib.suppress(ValueError):
            yield number(text)


def _way_out(setting: Setting, value: str) -> str:
    words = [*choices(setting.hint), *(str(option) for option in (True, False, None) if holds(setting.hint, option))]
    near = difflib.get_close_matches(value.lower(), [word.lower() for word in words], n=1)
    if near:
        return f"did you mean {next(word for word in words if word.lower() == near[0])}?"
    return f"give it as in {_example(setting)}"


def _example(setting: Setting) -> str:
    value = " ".join(map(str, setting.value)) if isinstance(setting.value, tuple) else str(setting.value)
    if setting.value is None:
        words = {int: "8", float: "0.1", str: "NAME"}
        value = [*choices(setting.hint), *(words[option] for option in options(setting.hint) if option in words), value][0]
    return f"{_option(setting.name)} {value}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _cause(stopped: BaseException, printed: str) -> ConfigError:
    """Return the ConfigError behind tyro's exit, else tyro's own words without the box."""
    error: BaseException | None = stopped
    while error is not None:
        if isinstance(error, ConfigError):
            return error
        error = error.__context__
    return ConfigError(" ".join(printed.translate(str.maketrans("╭╮╰╯│─", "      ")).split()))
