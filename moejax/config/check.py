"""Small checks that phrase a broken rule the way every setting does: name, value, rule, way out."""

import difflib
from collections.abc import Sequence

from moejax.errors import ConfigError


def check(holds: bool, message: str) -> None:
    """Raise ConfigError(message) unless the rule holds."""
    if not holds:
        raise ConfigError(message)


def at_least(name: str, value: float, minimum: float) -> None:
    check(value >= minimum, f"{name}={value} is below {minimum}; give a number >= {minimum}")


def divides(name: str, value: int, whole_name: str, whole: int) -> None:
    check(
        value > 0 and whole % value == 0,
        f"{name}={value} does not divide {whole_name}={whole}; choose a divisor of {whole} or change {whole_name}",
    )


def one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a name that is not in the list, and suggest the nearest one."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else "choose one of them"
        raise ConfigError(f"{name}={value} is not one of {', '.join(allowed)}; {hint}")
