"""Traced programs, read: what an operation holds inside, for those who run a program again in another way."""

from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


class Inner(NamedTuple):
    """A program inside another, and the arrays that it closes over."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]


class Loop(NamedTuple):
    """A scan: its body's arguments are `consts` constants, `carry` values that go round, and what is scanned."""

    body: Inner
    consts: int
    carry: int
    length: int
    reverse: bool


def called(eqn: JaxprEqn) -> Inner | None:
    """What an operation calls that does nothing but call: a jitted or recomputed function, or one with a derivative of its own."""
    if eqn.primitive.name not in _CALLS:
        return None
    return _inner(next(eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params))


def loop(eqn: JaxprEqn) -> Loop | None:
    """The loop that an operation is, if it is a scan."""
    if eqn.primitive.name != "scan":
        return None
    body = eqn.params["jaxpr"]
    # Only what is scanned and what is stacked has one more dim outside.
    scanned = sum(_rank(var.aval) > _rank(aval) for var, aval in zip(eqn.invars, body.in_avals, strict=True))
    stacked = sum(_rank(var.aval) > _rank(aval) for var, aval in zip(eqn.outvars, body.out_avals, strict=True))
    carry = len(body.out_avals) - stacked
    return Loop(_inner(body), len(body.in_avals) - scanned - carry, carry, eqn.params["length"], eqn.params["reverse"])


def _inner(program: ClosedJaxpr | Jaxpr) -> Inner:
    return Inner(program.jaxpr, tuple(program.consts)) if isinstance(program, ClosedJaxpr) else Inner(program, ())


def _rank(aval: Any) -> int:
    return len(aval.shape)
