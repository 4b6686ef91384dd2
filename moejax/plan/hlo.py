"""Optimised and scheduled HLO text, read into instructions and how often each runs.

while (known trip count 2)
  while (known trip count 3)  ->  its instructions run 6 times
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e8m0fnu"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO. type: its result, as printed. operands, attributes: the rest of the line, inside and after the brackets."""

    name: str
    type: str
    op: str
    operands: str
    attributes: str

    @property
    def op_name(self) -> str:
        """Where it comes from in the JAX program, such as jit(step)/shard_map/update/all_gather; empty if XLA does not say."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str | None:
        """What a custom call calls: the kernel for cuDNN and cuBLAS, else the target; None for other instructions."""
        if self.op != "custom-call":
            return None
        kind = re.search(r'"kind":"(__[^"]+)"', self.attributes) or re.search(r'custom_call_target="([^"]+)"', self.attributes)
        return kind[1] if kind else ""


class Hlo:
    """A module: `computations` by name with their instructions in scheduled order, `times` each one runs in one run of the program."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.times: dict[str, int] = {}
        entry, current = "", []
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
            elif found := _INSTRUCTION.match(line):
                current.append(Instruction(found["name"], found["type"], found["op"], *_split(found["rest"])))
        self._visit(entry, 1)

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that is scheduled (not those inside fusions), with how often it runs."""
        for name, times in self.times.items():
            yield from ((instruction, times) for instruction in self.computations[name])

    def conditionals(self) -> list[str]:
        """Names of the conditionals: on a GPU each one makes the device wait for the host."""
        return [instruction.name for instruction, _ in self.instructions() if instruction.op == "conditional"]

    def kernels(self) -> dict[str, int]:
        """Custom calls by target (for Mosaic GPU by the kernel's name), with the number of executions in one run."""
        counts: dict[str, int] = {}
        for scheduled, times in self.instructions():
            fused = self.computations[name] if (name := _fused(scheduled)) else [scheduled]
            for instruction in fused:
                if instruction.target is not None:
                    named = re.search(r"grouped_\w+", instruction.attributes)
                    label = named[0] if named else instruction.target
                    counts[label] = counts.get(label, 0) + times
        return dict(sorted(counts.items()))

    def _visit(self, name: str, times: int) -> None:
        self.times[name] = self.times.get(name, 0) + times
        for instruction in self.computations[name]:
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            for called in _called(instruction):
                if called in self.computations:
                    self._visit(called, times * (int(trips[1]) if trips else 1))


def arrays_of(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array in a printed type."""
    return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(text)]


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array; tokens and opaque types have none."""
    return _ITEM_BYTES.get(dtype, 0) * math.prod(shape)


def _called(instruction: Instruction) -> list[str]:
    """Computations whose instructions are scheduled because of this one; bodies of fusions and reductions are not."""
    if instruction.op == "while":
        return re.findall(r"body=%?([\w.\-]+)", instruction.attributes)
    if instruction.op == "conditional":
        branches = re.findall(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))", instruction.attributes)
        return re.findall(r"%?([\w.\-]+)", " ".join(part for pair in branches for part in pair))
    if instruction.op in ("call", "async-start"):
        return re.findall(r"(?:to_apply|calls)=%?([\w.\-]+)", instruction.attributes)
    return []


def _fused(instruction: Instruction) -> str | None:
    found = re.search(r"calls=%?([\w.\-]+)", instruction.attributes) if instruction.op == "fusion" else None
    return found[1] if found else None


def _split(rest: str) -> tuple[str, str]:
    """What stands inside the brackets of an instruction, and after them."""
    depth = 0
    for i, letter in enumerate(rest):
        if letter == ")" and depth == 0:
            return rest[:i], rest[i + 1 :]
        depth += (letter == "(") - (letter == ")")
    return rest, ""
