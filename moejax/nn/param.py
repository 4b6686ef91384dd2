"""Parameters are declared in NNX modules and live outside of them, in nested plain dicts.

A module is built once under `nnx.eval_shape` to read its declarations, which makes a `Template`; `bind` then puts arrays in,
global ones or this device's shards alike. So modules read sizes from their arrays, never from a config.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of one parameter: global shape, a name for each dim, initial values, and its compute dtype.

    init: "normal" (standard deviation std, cut at three deviations) or "ones".
    dtype: None is the model's compute dtype.
    """

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    init: Literal["normal", "ones"]
    std: float
    dtype: Literal["float32"] | None

    def stacked(self, layers: int, axis: str) -> "ParamSpec":
        """The same parameter for a stack of layers, with a leading dim of this logical name."""
        return replace(self, shape=(layers, *self.shape), logical_axes=(axis, *self.logical_axes))


@dataclass(frozen=True)
class Template:
    """A module without arrays: its NNX graph and the declarations of its parameters as a nested dict."""

    graph: nnx.GraphDef
    state: nnx.State
    specs: dict

    def bind(self, arrays: dict) -> Any:
        """The module with these arrays, a nested dict like `specs`; shapes may be those of local shards."""
        state = copy.copy(jax.tree.map(lambda leaf: leaf, self.state))
        nnx.replace_by_pure_dict(state, arrays)
        return nnx.merge(self.graph, state)


def param(
    *shape: int,
    axes: tuple[str, ...],
    init: Literal["normal", "ones"] = "normal",
    std: float = 0.0,
    dtype: Literal["float32"] | None = None,
) -> nnx.Param:
    """Declare a parameter of a module under construction in `make_template`."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), spec=ParamSpec(shape, axes, init, std, dtype))


def make_template(build: Callable[[], nnx.Module]) -> Template:
    """Read a module's declarations without allocating anything."""
    graph, state = nnx.split(nnx.eval_shape(build))
    specs = jax.tree.map(lambda variable: variable.get_metadata()["spec"], state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return Template(graph, state, nnx.to_pure_dict(specs) if isinstance(specs, nnx.State) else specs)


def is_spec(value: object) -> bool:
    return isinstance(value, ParamSpec)
