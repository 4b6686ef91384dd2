"""Where parameters and optimizer state live: one rule for every leaf.

A parameter is replicated over every mesh axis that its PartitionSpec does not name. Its gradient is reduce-scattered over
exactly those axes, its float32 state is sharded over them, and its new value is all-gathered over them. So dense weights
use ("dp", "ep") and experts ("dp",), with no special case (ZeRO stage 1, Rajbhandari et al. 2020).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec as P

_LOGICAL_TO_MESH = {"expert": "ep", "stage": "pp"}
_STACK_DIMS = ("layer", "stage", "expert")
_SMALL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Rule:
    """How one parameter is laid out.

    axes: mesh axes (of size > 1) that the parameter is replicated over.
    dim: dimension on which its float32 state is sharded over `axes`; None keeps the state replicated.
    param: PartitionSpec of the parameter.
    state: PartitionSpec of master, moments and reduced gradient.
    copies: devices that hold the same part of the state.
    """

    axes: tuple[str, ...]
    dim: int | None
    param: P
    state: P
    copies: int

    @property
    def is_gathered(self) -> bool:
        """Whether the parameter itself is kept as shards, to be gathered where it is used."""
        return self.dim is not None and self.param == self.state


def small_bytes() -> int:
    """Bytes below which the float32 state of a leaf is not worth splitting."""
    return _SMALL_BYTES


def make_rule(
    shape: Sequence[int],
    logical_axes: Sequence[str],
    mesh_shape: Mapping[str, int],
    *,
    elementwise: bool = True,
    weights: Literal["resident", "fsdp"] = "resident",
) -> Rule:
    """The rule of one leaf.

    The state is sharded on the first dim that divides: stack dims (layer, stage, expert) first, and the other dims only for
    optimizers that work element by element. A leaf below 64 KiB, or with no such dim, keeps its state replicated.
    With fsdp the parameter is sharded like its state, never on the layer dim, since every rank needs a part of each layer.
    """
    entries: list[tuple[str, ...]] = [_named(name, mesh_shape) for name in logical_axes]
    named = {axis for entry in entries for axis in entry}
    axes = tuple(axis for axis, size in mesh_shape.items() if axis not in named and size > 1)
    count = math.prod(mesh_shape[axis] for axis in axes)
    local = [size // math.prod(mesh_shape[a] for a in entry) for size, entry in zip(shape, entries, strict=True)]
    stack_dims = _STACK_DIMS if weights == "resident" else ("expert",)
    stack = [i for i, name in enumerate(logical_axes) if name in stack_dims]
    other = [i for i, name in enumerate(logical_axes) if name not in _STACK_DIMS] if elementwise else []
    dims = [i for i in stack + other if local[i] % count == 0]
    param = _spec(entries)
    if count == 1 or not dims or math.prod(local) * 4 < small_bytes():
        return Rule(axes, None, param, param, count)
    entries[dims[0]] = entries[dims[0]] + axes
    state = _spec(entries)
    return Rule(axes, dims[0], param if weights == "resident" else state, state, 1)


def _named(logical: str, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axis that splits a logical one. Stages are not named on a mesh that has one."""
    axis = _LOGICAL_TO_MESH.get(logical)
    return () if axis is None or (axis == "pp" and mesh_shape.get("pp", 1) == 1) else (axis,)


def _spec(entries: list[tuple[str, ...]]) -> P:
    return P(*(entry[0] if len(entry) == 1 else (entry or None) for entry in entries))
