"""What fills a GPU's memory when a compiled program needs most, read from XLA's own account of live buffers."""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moejax.parallel.scopes import BETWEEN_STAGES, GRADIENT_SUMS, KEPT
from moejax.plan.hlo import Hlo, Instruction, arrays_of

_ALLOCATION = re.compile(r"^allocation (\d+): size \d+, (.*)$")
_VALUE = re.compile(
    r"^\s*value: <\d+ (?P<name>[\w.\-]+?)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<type>.*)$"
)
_SEQUENCE = re.compile(r"^\s+\d+:([\w.\-]+)$")
_RANGE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$")


@dataclass(frozen=True)
class Buffer:
    """A place in memory that is in use at the peak. array: dtype and shape. op_name: what fills it in the JAX program."""

    name: str
    size_bytes: int
    array: str
    op_name: str

    @property
    def role(self) -> str:
        """The part of the training step's memory that it belongs to, as `moejax.plan.activations` names them."""
        is_carried = self.op_name.endswith(("/add", "/scatter", "/dynamic_update_slice", "/optimization_barrier"))
        scopes = {GRADIENT_SUMS: "gradient sums", BETWEEN_STAGES: "between stages", KEPT: "kept activations"}
        for scope, role in scopes.items():
            if is_carried and f"/{scope}/" in self.op_name:
                return role
        if not self.op_name.endswith("dynamic_update_slice"):
            return "working set"
        return "gradients" if "transpose(" in self.op_name else "kept activations"


@dataclass(frozen=True)
class _Value:
    """A result of an instruction, its place (allocation, offset), and the first and last moment at which it is needed."""

    name: str
    index: str
    place: tuple[str, int]
    size: int
    array: str
    start: int
    end: int


def peak_buffers(live_ranges: str, assignment: str, hlo: Hlo) -> list[Buffer]:
    """Places beside the arguments that are in use when most bytes are, largest first, from two dumps of a compilation and its HLO.

    What shares a place, such as the sums that a loop carries and the new sums written over them, is one buffer. (XLA's own list of a
    peak counts it twice.) XLA's arena can be larger than the sum of all, by what the packing wastes.
    """
    values = _values(live_ranges, assignment)
    moments = np.zeros(max((value.end for value in values), default=0) + 2, np.int64)
    for group in _by_place(values).values():
        used = np.zeros(len(moments), np.int64)
        for value in group:
            part = used[value.start : value.end + 1]
            np.maximum(part, value.size, out=part)
        moments += used
    peak = int(moments.argmax())
    alive = [value for value in values if value.start <= peak <= value.end]
    largest = [max(group, key=lambda value: value.size) for group in _by_place(alive).values()]
    places = _places(live_ranges, hlo)
    return sorted((_buffer(hlo, places, value) for value in largest), key=lambda buffer: -buffer.size_bytes)


def _places(live_ranges: str, hlo: Hlo) -> dict[str, tuple[str, Instruction]]:
    """Each scheduled instruction by name, with its computation; what an asynchronous one wraps stands for the one that starts it."""
    places = {instruction.name: (name, instruction) for name in hlo.times for instruction in hlo.computations[name]}
    sequence = [m[1] for m in map(_SEQUENCE.match, live_ranges.splitlines()) if m]
    wrapped = {inner: places[start] for inner, start in pairwise(sequence) if inner not in places and start in places}
    return places | wrapped


def _values(live_ranges: str, assignment: str) -> list[_Value]:
    """All values that do not lie in the memory of an argument."""
    section = live_ranges.split("BufferLiveRange:\n", 1)[1].split("Live ranges at", 1)[0]
    ranges = {(m[1], m[2]): (int(m[3]), int(m[4])) for m in map(_RANGE.match, section.splitlines()) if m}
    found, allocation, is_argument = [], "", False
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            allocation, is_argument = header[1], "parameter" in header[2]
        elif (m := _VALUE.match(line)) and not is_argument and (m["name"], m["index"] or "") in ranges:
            moments = ranges[m["name"], m["index"] or ""]
            array = arrays_of(m["type"])[:1]
            text = f"{array[0][0]}[{','.join(map(str, array[0][1]))}]" if array else m["type"]
            found.append(_Value(m["name"], m["index"] or "", (allocation, int(m["offset"])), int(m["size"]), text, *moments))
    return found


def _by_place(values: list[_Value]) -> dict[tuple[str, int], list[_Value]]:
    groups: dict[tuple[str, int], list[_Value]] = {}
    for value in values:
        groups.setdefault(value.place, []).append(value)
    return groups


def _buffer(hlo: Hlo, places: dict[str, tuple[str, Instruction]], value: _Value) -> Buffer:
    name = f"{value.name}{{{value.index}}}" if value.index else value.name
    return Buffer(name, value.size, value.array, _source(hlo, places, value))


def _source(hlo: Hlo, places: dict[str, tuple[str, Instruction]], value: _Value) -> str:
    """Where a value comes from in the JAX program: its instruction's name, or if it has none, the name of what it was made from.

    What a loop carries comes from what the loop's body puts there, also through loops in it.
    """
    bodies = {_body(i) for i, _ in hlo.instructions() if i.op == "while"}
    _, instruction = places.get(value.name, ("", None))
    index, seen = int(value.index) if value.index.isdigit() else None, set()
    while instruction is not None and (instruction.name, index) not in seen:
        seen.add((instruction.name, index))
        computation = places[instruction.name][0]
        body = _body(instruction) if instruction.op == "while" else computation
        if instruction.op == "while" or (instruction.op == "parameter" and computation in bodies):
            results = _operands(hlo.computations[body][-1])
            if index is None or index >= len(results):
                return ""
            (_, instruction), index = places.get(results[index], ("", None)), None
        elif instruction.op == "get-tuple-element" and (read := places.get(_operands(instruction)[0])) and read[1].op == "while":
            index, instruction = int(re.findall(r"index=(\d+)", instruction.attributes)[0]), read[1]
        elif name := _op_name(hlo, instruction):
            return name
        else:
            inputs = _operands(instruction)
            (_, instruction), index = places.get(inputs[0], ("", None)) if inputs else ("", None), None
    return ""


def _op_name(hlo: Hlo, instruction: Instruction) -> str:
    """Of an instruction, or of what a fusion without a name of its own computes last."""
    fused = re.findall(r"calls=%?([\w.\-]+)", instruction.attributes) if instruction.op == "fusion" else []
    names = [instruction.op_name, *(i.op_name for called in fused for i in reversed(hlo.computations[called]))]
    return next((name for name in names if name), "")


def _body(loop: Instruction) -> str:
    return re.findall(r"body=%?([\w.\-]+)", loop.attributes)[0]


def _operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.operands)
