"""What a compiled program sends between GPUs and to the host, read from its HLO."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moejax.plan.hlo import Hlo, Instruction, array_bytes, arrays_of

_KIND = re.compile(r"(all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute|collective-broadcast)(-start)?")
_OUTSIDE = ("infeed", "outfeed", "send", "recv")
_CALLBACKS = ("callback", "SendToHost", "RecvFromHost")
_COPIES = ("copy", "copy-start", "fusion", "fusion-start", "async-start", "dynamic-slice", "dynamic-update-slice")
_HOST_SPACE = "S(5)"  # XLA's memory space of pinned host memory
_NO_KERNEL = ("bitcast", "get-tuple-element", "tuple", "parameter", "constant", "partition-id", "after-all")


@dataclass(frozen=True)
class Collective:
    """One collective of a program, seen from one device.

    axes: mesh axes (of size > 1) that it spans.
    shapes: printed arrays that come out. payloads: bytes carried for each: of the whole gathered or scattered array; of a ragged
    all-to-all the routes, not the buffer with room for more.
    times: executions in one run of the program.
    overlap: kernels scheduled between its start and its end; None if it is synchronous.
    op_name: where it comes from in the JAX program.
    """

    kind: str
    axes: tuple[str, ...]
    shapes: tuple[str, ...]
    payloads: tuple[int, ...]
    times: int
    overlap: int | None
    op_name: str

    @property
    def payload(self) -> int:
        return sum(self.payloads)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({shape.split("[")[0] for shape in self.shapes}))

    def payload_of(self, dtype: str) -> int:
        """Bytes carried in arrays of this dtype, as HLO prints it."""
        return sum(size for shape, size in zip(self.shapes, self.payloads, strict=True) if shape.split("[")[0] == dtype)


@dataclass(frozen=True)
class HostTransfer:
    """Something that leaves for the host, or comes from there. size_bytes counts one execution."""

    what: str
    size_bytes: int
    times: int


def collectives(hlo: Hlo, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """All collectives; one that was split into start and end counts once.

    Raises:
        ValueError: if the groups of one are no axes of the mesh.
    """
    found = []
    for name, times in hlo.times.items():
        body = hlo.computations[name]
        for place, instruction in enumerate(body):
            if kind := _KIND.fullmatch(instruction.op):
                overlap = _overlap(body, place) if kind[2] else None
                moved = _moved(body, instruction, kind[1], overlap is not None)
                found.append(_collective(instruction, kind[1], moved, times, mesh_shape, overlap))
    return found


def host_transfers(hlo: Hlo) -> list[HostTransfer]:
    """Copies to and from pinned host memory, infeeds, sends and callbacks."""
    found = []
    for name, times in hlo.times.items():
        body = hlo.computations[name]
        for instruction in body:
            is_copy = instruction.op in _COPIES and _HOST_SPACE in instruction.type
            if is_copy or instruction.op in _OUTSIDE or any(word in (instruction.target or "") for word in _CALLBACKS):
                what = f"{instruction.op} {instruction.type} {instruction.op_name}"
                found.append(HostTransfer(what, _slice_bytes(body, instruction), times))
    return found


def _slice_bytes(body: list[Instruction], instruction: Instruction) -> int:
    """Bytes that cross: those of the smallest array involved, for a layer's part goes into, or comes out of, an array of all layers."""
    read = re.findall(r"%([\w.\-]+)", instruction.operands)
    types = [instruction.type, *(i.type for i in body if i.name in read)]
    arrays = [array_bytes(*array) for text in types for array in arrays_of(text) if array[1]]
    return min(arrays, default=0)


def table(found: list[Collective]) -> str:
    """The collectives as lines of text, equal ones in one line, largest first. overlap: kernels between start and end, - if synchronous."""
    lines: dict[tuple, list[int]] = {}
    for c in found:
        shape = c.shapes[0] if len(c.shapes) == 1 else f"{len(c.shapes)} arrays of {', '.join(c.dtypes)}"
        key = (c.kind, ",".join(c.axes), shape, c.payload, "-" if c.overlap is None else str(c.overlap))
        lines.setdefault(key, []).append(c.times)
    rows = [("collective", "axes", "static", "runs", "MiB each", "overlap", "result")]
    for (kind, axes, shape, payload, overlap), times in sorted(lines.items(), key=lambda item: -item[0][3] * sum(item[1])):
        rows.append((kind, axes, str(len(times)), str(sum(times)), f"{payload / 2**20:.3f}", overlap, shape))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows)


def _moved(body: list[Instruction], instruction: Instruction, kind: str, is_start: bool) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays whose elements a collective carries."""
    arrays = arrays_of(instruction.type)
    if kind == "ragged-all-to-all":
        # Of operand and result, the side without room to spare holds the routes.
        operand = re.findall(r"%([\w.\-]+)", instruction.operands)[0]
        made = next(i.type for i in body if i.name == operand)
        return [min((array for array in (*arrays, *arrays_of(made)) if len(array[1]) > 1), key=lambda array: array_bytes(*array))]
    # A start gives its operands and then its results, but for an all-reduce, whose results are all there is.
    return arrays[len(arrays) // 2 :] if is_start and kind != "all-reduce" else arrays


def _collective(
    instruction: Instruction, kind: str, moved: list, times: int, mesh_shape: Mapping[str, int], overlap: int | None
) -> Collective:
    axes = _axes(instruction.attributes, mesh_shape)
    whole = math.prod(mesh_shape[axis] for axis in axes) if kind == "reduce-scatter" else 1
    sizes = tuple(array_bytes(*array) * whole for array in moved)
    shapes = tuple(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in moved)
    return Collective(kind, axes, shapes, sizes, times, overlap, instruction.op_name)


def _axes(attributes: str, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a collective, from any of the ways in which XLA prints its groups."""
    if named := re.search(r"replica_groups=mesh\[[^\]]*\]\s*\{([^}]*)\}", attributes):
        listed = re.findall(r"'(\w+)'", named[1])
        return tuple(axis for axis, size in mesh_shape.items() if axis in listed and size > 1)
    group = _first_group(attributes, math.prod(mesh_shape.values()))
    devices = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    large = [axis for axis, size in mesh_shape.items() if size > 1]
    for count in range(len(large) + 1):
        for chosen in itertools.combinations(large, count):
            if devices[tuple(slice(None) if axis in chosen else 0 for axis in mesh_shape)].reshape(-1).tolist() == group:
                return chosen
    raise ValueError(f"replica groups are no axes of the mesh {dict(mesh_shape)}: {attributes[:200]}")


def _first_group(attributes: str, devices: int) -> list[int]:
    """The group of device 0."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return [int(d) for d in listed[1].split(",")]
    if pairs := re.search(r"source_target_pairs=(\{\{[\d,{}]*\}\})", attributes):
        return _ring_of_zero({int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])})
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        dims = [int(d) for d in iota[3].split(",")]
        order = [int(d) for d in iota[4].split(",")] if iota[4] else list(range(len(dims)))
        return np.arange(devices).reshape(dims).transpose(order).reshape(-1)[: int(iota[2])].tolist()
    return list(range(devices))


def _ring_of_zero(target: dict[int, int]) -> list[int]:
    """Devices that a permutation leads through from 0, in rising order."""
    ring, place = [0], target.get(0, 0)
    while place not in ring:
        ring.append(place)
        place = target.get(place, 0)
    return sorted(ring)


def _overlap(body: list[Instruction], place: int) -> int:
    """Kernels scheduled between a start and its end."""
    name = re.compile(rf"%{re.escape(body[place].name)}(?![\w.\-])")
    end = next((i for i in range(place + 1, len(body)) if name.search(body[i].operands)), place)
    return sum(1 for i in body[place + 1 : end] if i.op not in _NO_KERNEL and not i.op.endswith(("-start", "-done")))
