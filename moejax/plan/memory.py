"""What fills a GPU's memory when a compiled program needs most, read from XLA's own account of live buffers."""

import re
from dataclasses import dataclass

from moejax.plan.hlo import Hlo, Instruction, array_bytes, arrays_of

_LINE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}: (\d+) bytes")
_ALLOCATION = re.compile(r"^allocation (\d+): size \d+, (.*)$")
_VALUE = re.compile(r"^\s*value: <\d+ ([\w.\-]+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=\d+,offset=(\d+)\)")


@dataclass(frozen=True)
class Buffer:
    """A buffer that is alive at the peak.

    array: dtype and shape. op_name: what makes it in the JAX program. is_argument: whether the program gets it as an argument.
    """

    name: str
    size_bytes: int
    array: str
    op_name: str
    is_argument: bool


def peak_buffers(live_ranges: str, assignment: str, hlo: Hlo) -> list[Buffer]:
    """Buffers alive when most bytes are, largest first, read from two dumps of a compilation and its HLO.

    What shares one place in memory, such as the sums that a loop carries and the new sums that it writes over them, is one buffer.
    XLA's arena can be larger than the sum of all, by what the packing wastes.
    """
    section = live_ranges.split("(peak):\n", 1)[1]
    slots, arguments = _slots(assignment)
    seen = set()
    places = {instruction.name: (name, instruction) for name in hlo.times for instruction in hlo.computations[name]}
    callers = {body: i for i, _ in hlo.instructions() if i.op == "while" for body in re.findall(r"body=%?([\w.\-]+)", i.attributes)}
    found = []
    for line in section.splitlines():
        if not (matched := _LINE.match(line)):
            break
        name, index = matched[1], matched[2]
        computation, instruction = places.get(name, ("", None))
        slot = slots.get((name, index), (name, index))
        if slot in seen:
            continue
        seen.add(slot)
        is_argument = slot[0] in arguments
        source = _source(hlo, callers, computation, instruction, int(index) if index.isdigit() else None)
        size = int(matched[3])
        found.append(Buffer(f"{name}{{{index}}}" if index else name, size, _array(instruction, index, size), source, is_argument))
    return sorted(found, key=lambda buffer: -buffer.size_bytes)


def _slots(assignment: str) -> tuple[dict[tuple[str, str], tuple[str, str]], set[str]]:
    """(name, tuple index) of each value -> (allocation, offset), and the allocations of the program's arguments."""
    slots, arguments, allocation = {}, set(), ""
    for line in assignment.splitlines():
        if header := _ALLOCATION.match(line):
            allocation = header[1]
            if "parameter" in header[2]:
                arguments.add(allocation)
        elif value := _VALUE.match(line):
            slots[value[1], value[2] or ""] = (allocation, value[3])
    return slots, arguments


def _array(instruction: Instruction | None, index: str, size: int) -> str:
    """The printed array of a buffer: the named element of a tuple."""
    arrays = arrays_of(instruction.type) if instruction else []
    picked = arrays[int(index)] if index.isdigit() and int(index) < len(arrays) else (arrays[0] if arrays else None)
    if picked is None or array_bytes(*picked) != size:
        picked = next((array for array in arrays if array_bytes(*array) == size), picked)
    return f"{picked[0]}[{','.join(map(str, picked[1]))}]" if picked else ""


def _source(hlo: Hlo, callers: dict, computation: str, instruction: Instruction | None, index: int | None) -> str:
    """Where a buffer comes from; for what a loop carries, what its body puts there."""
    if instruction is None:
        return ""
    if instruction.op == "parameter" and computation in callers:
        return _made_by_body(hlo, computation, index)
    if instruction.op == "while" and index is not None:
        body = re.findall(r"body=%?([\w.\-]+)", instruction.attributes)
        return _made_by_body(hlo, body[0], index) if body else instruction.op_name
    return _op_name(hlo, instruction)


def _op_name(hlo: Hlo, instruction: Instruction) -> str:
    """Of an instruction, or of what a fusion without a name of its own computes last."""
    fused = re.findall(r"calls=%?([\w.\-]+)", instruction.attributes) if instruction.op == "fusion" else []
    names = [instruction.op_name, *(i.op_name for called in fused for i in reversed(hlo.computations[called]))]
    return next((name for name in names if name), "")


def _made_by_body(hlo: Hlo, body: str, index: int | None) -> str:
    instructions = {instruction.name: instruction for instruction in hlo.computations[body]}
    results = re.findall(r"%([\w.\-]+)", hlo.computations[body][-1].operands)
    maker = instructions.get(results[index]) if index is not None and index < len(results) else None
    while maker is not None and not _op_name(hlo, maker) and (inputs := re.findall(r"%([\w.\-]+)", maker.operands)):
        maker = instructions.get(inputs[0])
    return _op_name(hlo, maker) if maker else ""
