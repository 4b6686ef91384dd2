"""A function of float32 arrays, computed in float64 with none of its custom derivatives.

The function is traced as it is and its program is run again operation by operation. Whatever it rounds to float32 or bfloat16 on the way
is float64 here, and what it differentiates by a rule of its own is differentiated like everything else. So a model's own code can serve as
the truth that its kernels, rematerialisation and hand-written derivatives are held against. Constants stay as precise as the program has
them: 1 / sqrt(8) is a float32 there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from moejax.ops.programs import Loop, called, loop

_DTYPES = ("preferred_element_type", "dtype", "new_dtype")
"""Parameters of operations that name the dtype of the result."""


def in_float64(fn: Callable, *args: Any) -> Callable:
    """`fn` for arguments like these (trees of arrays or of jax.ShapeDtypeStruct), in float64. Call it under `jax.enable_x64(True)`.

    Raises:
        NotImplementedError: when called, if `fn` reads the bits of a float or loops for an unknown number of times.
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    result = jax.tree.structure(shapes)

    def run(*args: Any) -> Any:
        flat = [_wide(leaf) for leaf in jax.tree.leaves(args)]
        return jax.tree.unflatten(result, _run(program.jaxpr, program.consts, flat))

    return run


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_wide, consts), strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        is_literal = isinstance(atom, Literal)
        return _wide(np.asarray(atom.val, jnp.result_type(atom.aval))) if is_literal else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if (inner := called(eqn)) is not None:
            outputs: Sequence[Any] = _run(*inner, inputs)
        elif (inside := loop(eqn)) is not None:
            outputs = _scan(inside, inputs)
        else:
            outputs = _HANDLERS.get(eqn.primitive.name, _compute)(eqn, inputs)
        for var, output in zip(eqn.outvars, outputs, strict=True):
            values[var] = _wide(output)
    return [read(atom) for atom in jaxpr.outvars]


def _wide(x: Any) -> Any:
    """Floats as float64, everything else as it is."""
    if jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return jnp.asarray(x, jnp.float64)
    return jnp.asarray(x)


def _compute(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """The same operation with wide results."""
    primitive, params = eqn.primitive, eqn.params
    if "jaxpr" in params or "call_jaxpr" in params:
        raise NotImplementedError(f"{primitive.name} holds a program of its own, which cannot be computed in float64")
    wide = {name: _wide_dtype(params[name]) for name in _DTYPES if params.get(name) is not None}
    outputs = primitive.bind(*inputs, **(params | wide))
    return outputs if primitive.multiple_results else [outputs]


def _wide_dtype(dtype: Any) -> Any:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _scan(loop: Loop, inputs: list[Any]) -> list[Any]:
    fixed, start, xs = inputs[: loop.consts], inputs[loop.consts : loop.consts + loop.carry], inputs[loop.consts + loop.carry :]

    def body(state: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _run(*loop.body, [*fixed, *state, *x])
        return outputs[: loop.carry], outputs[loop.carry :]

    state, ys = lax.scan(body, start, xs, length=loop.length, reverse=loop.reverse)
    return [*state, *ys]


def _cond(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    index, *operands = inputs
    branches = [lambda *args, b=branch: _run(b.jaxpr, b.consts, args) for branch in eqn.params["branches"]]
    return lax.switch(index, branches, *operands)


def _scatter(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    """Anew, because the operation holds its reduction as a program for one dtype."""
    scatter = {"scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter_add": lax.scatter_add}[eqn.primitive.name]
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return [scatter(*inputs, **{name: eqn.params[name] for name in names})]


def _same(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    return inputs


def _refuse_loop(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    raise NotImplementedError("a loop of unknown length has no derivative; use lax.scan or lax.fori_loop with fixed bounds")


def _bits(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
    if jnp.issubdtype(inputs[0].dtype, jnp.floating):
        raise NotImplementedError("the bits of a float are others in float64; make random numbers from integers")
    return [eqn.primitive.bind(*inputs, **eqn.params)]


_HANDLERS: dict[str, Callable[[JaxprEqn, list[Any]], Sequence[Any]]] = {
    **dict.fromkeys(("optimization_barrier", "reduce_precision", "name"), _same),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), _scatter),
    "cond": _cond,
    "while": _refuse_loop,
    "bitcast_convert_type": _bits,
}
