"""What a compiled program does between GPUs and with the host, read from its optimised and scheduled HLO text.

while (known trip count 2)                 a collective's `times` is the product of the trip counts around it
  while (known trip count 3)  ->  times 6
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
_KINDS = "all-reduce|all-gather|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute|collective-broadcast"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_OUTSIDE = ("infeed", "outfeed", "send", "recv", "host-execute")
_CALLBACKS = ("callback", "SendToHost", "RecvFromHost", "MoveToHost", "MoveToDevice")
_NO_WORK = (
    "bitcast",
    "get-tuple-element",
    "tuple",
    "parameter",
    "constant",
    "copy-start",
    "copy-done",
    "async-start",
    "async-done",
    "partition-id",
)


@dataclass(frozen=True)
class Instruction:
    """One line of HLO. type: its result, as printed. operands and attributes: the rest of the line."""

    name: str
    type: str
    op: str
    operands: str
    attributes: str

    @property
    def op_name(self) -> str:
        """Where it comes from in the JAX program, such as jit(step)/shard_map/update/all_gather."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Collective:
    """One collective in the program, sizes of one device.

    axes: mesh axes that it spans. payload: bytes of the rows or elements that it carries: the larger side of an all-gather or
    reduce-scatter; of a ragged all-to-all the routes, not the buffer with room for more. times: executions in one run of the program.
    overlap: kernels scheduled between its start and its end; None if it is synchronous. op_name: source in the JAX program.
    """

    kind: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    payload: int
    times: int
    overlap: int | None
    op_name: str


class Hlo:
    """A parsed module: computations with their instructions in scheduled order, and how often each computation runs."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] | None = None
        for line in text.splitlines():
            if (header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)) and not line.startswith(" "):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif current is not None and (found := _INSTRUCTION.match(line)):
                operands, attributes = _split_operands(found["rest"])
                current.append(Instruction(found["name"], found["type"], found["op"], operands, attributes))
        self.times = self._execution_counts()

    def instructions(self) -> Iterator[tuple[Instruction, int]]:
        """Every instruction that runs, with how often in one run of the program."""
        for name, times in self.times.items():
            yield from ((instruction, times) for instruction in self.computations[name])

    def collectives(self, mesh_shape: Mapping[str, int]) -> list[Collective]:
        """All collectives in scheduled order; one that was split into start and end counts once."""
        found = []
        for name, times in self.times.items():
            body = self.computations[name]
            for place, instruction in enumerate(body):
                kind, started = _collective_kind(instruction)
                if kind is not None:
                    found.append(_collective(instruction, kind, times, mesh_shape, _overlap(body, place) if started else None))
        return found

    def conditionals(self) -> list[str]:
        """Names of the conditionals: on a GPU each makes the device wait for the host."""
        return [instruction.name for instruction, _ in self.instructions() if instruction.op == "conditional"]

    def host_transfers(self) -> list[str]:
        """Descriptions of everything that leaves for the host or comes from it, copies to pinned memory included."""
        found = []
        for instruction, times in self.instructions():
            target = _custom_call_target(instruction)
            crosses = _crosses_to_host(instruction)
            if instruction.op in _OUTSIDE or crosses or (target and any(word in target for word in _CALLBACKS)):
                found.append(f"{times} x {instruction.op} {instruction.name} {instruction.type} {instruction.op_name}")
        return found

    def host_bytes(self) -> int:
        """Bytes copied between device and pinned host memory in one run, both ways."""
        return sum(times * type_bytes(_last_array(i.type)) for i, times in self.instructions() if _crosses_to_host(i))

    def kernels(self) -> dict[str, int]:
        """Custom calls by target (for Mosaic GPU by kernel name), with the number of executions in one run."""
        counts: dict[str, int] = {}
        for instruction, times in self.instructions():
            if target := _custom_call_target(instruction):
                named = re.search(r"moejax_\w+", instruction.attributes) if target.startswith("mosaic_gpu") else None
                label = named[0] if named else target
                counts[label] = counts.get(label, 0) + times
        return dict(sorted(counts.items()))

    def _execution_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            counts[name] = counts.get(name, 0) + times
            for instruction in self.computations[name]:
                if instruction.op == "while":
                    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
                    visit(_called(instruction, "body"), times * (int(trips[1]) if trips else 1))
                elif instruction.op in ("call", "async-start"):
                    target = re.search(r"(?:to_apply|calls)=%?([\w.\-]+)", instruction.attributes)
                    if target and target[1] in self.computations:
                        visit(target[1], times)
                elif instruction.op == "conditional":
                    for branch in re.findall(
                        r"%?([\w.\-]+)", "".join(re.findall(r"branch_computations=\{([^}]*)\}", instruction.attributes))
                    ):
                        visit(branch, times)

        visit(self.entry, 1)
        return counts


def type_bytes(text: str) -> int:
    """Bytes of all arrays in a printed HLO type; types below one byte and tokens count 0."""
    return sum(_array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(text))


def _array_bytes(dtype: str, dims: str) -> int:
    size = _ITEM_BYTES.get(dtype, 1 if dtype.startswith("f8") else 0)
    return size * math.prod(int(d) for d in dims.split(",") if d)


def _split_operands(rest: str) -> tuple[str, str]:
    depth = 0
    for i, letter in enumerate(rest):
        depth += letter == "("
        if letter == ")":
            if depth == 0:
                return rest[:i], rest[i + 1 :]
            depth -= 1
    return rest, ""


def _called(instruction: Instruction, role: str) -> str:
    found = re.search(rf"{role}=%?([\w.\-]+)", instruction.attributes)
    assert found, f"{instruction.name} has no {role}"
    return found[1]


def _custom_call_target(instruction: Instruction) -> str | None:
    if instruction.op != "custom-call":
        return None
    kind = re.search(r'"kind":"(__[^"]+)"', instruction.attributes)
    found = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
    return kind[1] if kind else (found[1] if found else None)


def _crosses_to_host(instruction: Instruction) -> bool:
    """A copy between pinned host memory, XLA's memory space 5, and the device."""
    if instruction.op not in ("copy-start", "copy", "dynamic-update-slice", "dynamic-slice", "async-start", "fusion"):
        return False
    return "S(5)" in instruction.type


def _last_array(text: str) -> str:
    found = _ARRAY.search(text)
    return found[0] if found else ""


def _collective_kind(instruction: Instruction) -> tuple[str | None, bool]:
    found = re.fullmatch(rf"({_KINDS})(-start)?", instruction.op)
    return (found[1], found[2] is not None) if found else (None, False)


def _collective(instruction: Instruction, kind: str, times: int, mesh_shape: Mapping[str, int], overlap: int | None) -> Collective:
    arrays = _ARRAY.findall(instruction.type)
    sized = [(dtype, dims, _array_bytes(dtype, dims)) for dtype, dims in arrays]
    axes = _axes(instruction.attributes, mesh_shape)
    group = math.prod(mesh_shape[axis] for axis in axes)
    if kind == "ragged-all-to-all":
        rows = [entry for entry in sized if entry[0] not in ("s32", "s64")]
        results = [min(rows, key=lambda entry: entry[2])]
        payload = results[0][2]
    else:
        results = _results(instruction, kind, sized, group, overlap is not None)
        payload = sum(size for *_, size in results) * (group if kind == "reduce-scatter" else 1)
    shapes = tuple(f"{dtype}[{dims}]" for dtype, dims, _ in results)
    dtypes = tuple(sorted({dtype for dtype, *_ in results}))
    return Collective(kind, axes, dtypes, shapes, payload, times, overlap, instruction.op_name)


def _results(instruction: Instruction, kind: str, sized: list, group: int, started: bool) -> list:
    """The arrays that come out; a start prints its operands before them, except an all-reduce."""
    if not started or kind == "all-reduce":
        return sized
    return sized[len(sized) // 2 :]


def _axes(attributes: str, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes (of size > 1) of a collective, from any of the ways in which XLA prints its groups."""
    named = re.search(r"replica_groups=mesh\[[^\]]*\]\s*\{([^}]*)\}", attributes)
    if named:
        listed = re.findall(r"'(\w+)'", named[1])
        return tuple(axis for axis in mesh_shape if axis in listed and mesh_shape[axis] > 1)
    first = _first_group(attributes, math.prod(mesh_shape.values()))
    for chosen in _subsets([axis for axis, size in mesh_shape.items() if size > 1]):
        if first == _group_of_zero(chosen, mesh_shape):
            return chosen
    raise ValueError(f"replica groups are no axes of the mesh {dict(mesh_shape)}: {attributes[:200]}")


def _first_group(attributes: str, devices: int) -> list[int]:
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed:
        return [int(d) for d in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        dims = [int(d) for d in iota[3].split(",")]
        order = [int(d) for d in iota[4].split(",")] if iota[4] else list(range(len(dims)))
        return _transposed_iota(dims, order)[: int(iota[2])]
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pairs:
        raise ValueError("a collective-permute has pairs, not groups")
    return list(range(devices))


def _transposed_iota(dims: list[int], order: list[int]) -> list[int]:
    import numpy as np

    return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(-1).tolist()


def _group_of_zero(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> list[int]:
    import numpy as np

    devices = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    return devices[tuple(slice(None) if axis in axes else 0 for axis in mesh_shape)].reshape(-1).tolist()


def _subsets(axes: list[str]) -> Iterator[tuple[str, ...]]:
    for bits in range(1 << len(axes)):
        yield tuple(axis for i, axis in enumerate(axes) if bits >> i & 1)


def _overlap(body: list[Instruction], place: int) -> int:
    """Kernels scheduled between a start and its end."""
    done = next(
        (i for i in range(place + 1, len(body)) if re.search(rf"%{re.escape(body[place].name)}\b(?![.\w\-])", body[i].operands)), place
    )
    return sum(
        1 for instruction in body[place + 1 : done] if instruction.op not in _NO_WORK and not instruction.op.endswith(("-start", "-done"))
    )
