"""The check of annotations that tests run under."""

from beartype import BeartypeConf, beartype

# The tower lets an int stand where a float is annotated, as type checkers do.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_functions(function):
    """Check calls of a function. Constructors are left alone: JAX rebuilds pytree dataclasses with specs, shapes or tracers as leaves."""
    return function if function.__name__ == "__init__" else _checked(function)
