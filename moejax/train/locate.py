"""Where a step stops being finite: the first weight, or the first named result of the first layer, forward and then backward.

jax_debug_nans cannot look into shard_map and loops. Here the step's own program is traced again with one flag for every result that has a
name (`checkpoint_name` in moejax.nn) in every layer, so that a run under expert and data parallelism says "moe_blocks, layer 3,
expert_gate_up" and not that something somewhere was NaN.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.config import TrainConfig
from moejax.errors import TrainingError
from moejax.nn import STACKS, forward
from moejax.ops.programs import Loop, called, loop
from moejax.parallel import AXES
from moejax.testing import named_leaves
from moejax.train.microbatches import Microbatches
from moejax.train.state import TrainState, make_layout, state_specs
from moejax.train.step import BATCH_SPEC, Batch, Step, make_grad_fn

_OUTPUT = "output"


def stop_where_not_finite(step: Step, config: TrainConfig, mesh: Mesh) -> Step:
    """The same step, which waits for the device and raises TrainingError at the first loss or gradient that is not finite.

    Such a step changes no weights, so the state after it is the one that it began with.
    """

    def checked(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        state, metrics = step(state, batch)
        if float(metrics["optim/finite"]) == 0:
            place = find_non_finite(config, mesh, state, batch)
            raise TrainingError(f"step {int(state.step)}: loss or gradient is not finite; {place}. The step was not applied")
        return state, metrics

    return checked


def find_non_finite(config: TrainConfig, mesh: Mesh, state: TrainState, batch: Batch) -> str:
    """Words on the first value of the step that is not finite, in the order in which the step makes them."""
    if (found := _first(named_leaves(jax.tree.map(np.asarray, state.params)))) is not None:
        return f"it begins in the weights: {found}"
    if (found := _in_forward(config, mesh, state, batch)) is not None:
        return f"it begins in the forward pass: {found}"
    gradients, metrics = make_grad_fn(config, mesh)(state.params, state.router, state.step - 1, batch)
    if not np.isfinite(float(metrics["train/loss"])):
        return "all blocks are finite and the loss is not: it begins in the head"
    leaves = named_leaves(gradients)
    if (found := _first(dict(sorted(leaves.items(), key=_backward_order)), from_the_end=True)) is not None:
        return f"the forward pass is finite; it begins in the backward pass: the gradient of {found}"
    return "run again it is finite: the program is not deterministic on this device"


def _in_forward(config: TrainConfig, mesh: Mesh, state: TrainState, batch: Batch) -> str | None:
    """The first named result, of the first layer and microbatch that has one."""
    layout = make_layout(config, mesh)
    specs = state_specs(config, layout)
    names: dict[str, list[str]] = {}

    def look(params: dict, router: dict, step: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        rows, one = batch["tokens"].shape[1], jnp.float32(1)
        micro = Microbatches(config, layout.model, router, step, batch, one, one, config.microbatch_size, rows)

        def one_microbatch(m: jax.Array) -> dict[str, jax.Array]:
            x, flags = layout.model.embed(params, micro.part(m)["tokens"]), {}
            flags["embed"] = _is_finite(x)
            for name in (stack for stack in STACKS if stack in params):
                run = layout.model.layers(name, params[name], router, micro.tokens(m), dropless=False)
                tapped = run._replace(make_block=lambda window, repeats, n=name, r=run: _tapped(r.make_block(window, repeats), names, n))
                x, flags[name] = forward(tapped, x)
            return flags

        flags = lax.map(one_microbatch, jnp.arange(config.microbatches, dtype=jnp.int32))
        return jax.tree.map(lambda f: lax.pmin(f, AXES), flags)

    mapped = jax.shard_map(look, mesh=mesh, in_specs=(specs.params, specs.router, P(), BATCH_SPEC), out_specs=P(), check_vma=False)
    flags = jax.tree.map(np.asarray, jax.jit(mapped)(state.params, state.router, state.step - 1, batch))
    if not flags["embed"].all():
        return "the embedding's output"
    for name in (stack for stack in STACKS if stack in flags):
        bad = np.argwhere(flags[name].min(axis=0) == 0)  # [microbatches, layers, names]
        if len(bad):
            layer, which = bad[0]
            microbatch = int(np.argmin(flags[name][:, layer, which]))
            return f"{name}, layer {layer}, {names[name][which]}, in microbatch {microbatch}"
    return None


def _tapped(block: Callable, names: dict[str, list[str]], stack: str) -> Callable:
    """The block, which reports int32 [names]: 1 where a named result is finite, in the order in which they are made."""

    def run(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(block, return_shape=True)(*args)
        found: list[tuple[str, jax.Array]] = []
        flat = _run(program.jaxpr, program.consts, jax.tree.leaves(args), found)
        (y, scalar), _ = jax.tree.unflatten(jax.tree.structure(shapes), flat)
        found.append((_OUTPUT, _is_finite(y)))
        names[stack] = [name for name, _ in found]
        return (y, scalar), jnp.stack([flag for _, flag in found])

    return run


def _run(jaxpr: Jaxpr, consts: Any, args: Any, found: list[tuple[str, jax.Array]]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        outputs = _outputs(eqn, [read(atom) for atom in eqn.invars], found)
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _outputs(eqn: JaxprEqn, inputs: list[Any], found: list[tuple[str, jax.Array]]) -> list[Any]:
    if (inner := called(eqn)) is not None:
        return _run(*inner, inputs, found)
    if (inside := loop(eqn)) is not None:
        return _scan(inside, inputs, found)
    outputs = eqn.primitive.bind(*inputs, **eqn.params)
    outputs = list(outputs) if eqn.primitive.multiple_results else [outputs]
    if eqn.primitive.name == "name" and jnp.issubdtype(outputs[0].dtype, jnp.floating):
        found.append((eqn.params["name"], _is_finite(outputs[0])))
    return outputs


def _scan(loop: Loop, inputs: list[Any], found: list[tuple[str, jax.Array]]) -> list[Any]:
    """A loop inside a layer, as over chunks of tokens: a result is finite if it is in every turn."""
    fixed, start, xs = inputs[: loop.consts], inputs[loop.consts : loop.consts + loop.carry], inputs[loop.consts + loop.carry :]
    names: list[str] = []

    def body(state: list[Any], x: list[Any]) -> tuple[list[Any], tuple[list[Any], list[jax.Array]]]:
        inside: list[tuple[str, jax.Array]] = []
        outputs = _run(*loop.body, [*fixed, *state, *x], inside)
        names[:] = [name for name, _ in inside]
        return outputs[: loop.carry], (outputs[loop.carry :], [flag for _, flag in inside])

    state, (ys, flags) = lax.scan(body, start, xs, length=loop.length, reverse=loop.reverse)
    found += [(name, flag.min()) for name, flag in zip(names, flags, strict=True)]
    return [*state, *ys]


def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all().astype(jnp.int32)


def _backward_order(item: tuple[str, Any]) -> int:
    parts = ("head", "moe_blocks", "dense_blocks", "embed")
    return next(i for i, part in enumerate(parts) if item[0].startswith(part))


def _first(leaves: dict[str, np.ndarray], *, from_the_end: bool = False) -> str | None:
    """Name, layer and expert of the first array that is not finite; of a stack the first layer, or the last one."""
    for name, value in leaves.items():
        if not np.isfinite(np.asarray(value, np.float32)).all():
            if "_blocks." not in name:
                return name
            bad = np.argwhere(~np.isfinite(np.asarray(value, np.float32)))
            index = bad[-1 if from_the_end else 0]
            return f"{name}, layer {index[0]}" + (f", expert {index[1]}" if ".experts." in name else "")
    return None
