"""Looks at checkpoints as they lie on disk: what they hold, what is broken, how two of them differ. Needs no model and no accelerator."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from moejax.checkpoint import format as fmt
from moejax.checkpoint.restore import form, read_manifest

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Change:
    """How an array of the second checkpoint differs from that of the first: largest absolute and largest relative difference of a number.

    The relative one is to the largest magnitude in the first array.
    """

    name: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """only_a, only_b: arrays of one alone. shapes: "name: a -> b". settings: "name: a -> b". changes: arrays whose numbers differ.

    equal: how many arrays are equal to the bit.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    shapes: tuple[str, ...]
    settings: tuple[str, ...]
    changes: tuple[Change, ...]
    equal: int

    @property
    def differs(self) -> bool:
        return bool(self.only_a or self.only_b or self.shapes or self.settings or self.changes)


def branches(manifest: dict[str, Any], depth: int) -> list[tuple[str, int, int]]:
    """(dotted prefix of that many names, numbers, bytes) of what a checkpoint holds, in the order of its arrays."""
    found: dict[str, tuple[int, int]] = {}
    for name, array in manifest["arrays"].items():
        prefix = ".".join(name.split(".")[:depth])
        numbers = int(np.prod(array["shape"], dtype=np.int64))
        before = found.get(prefix, (0, 0))
        found[prefix] = before[0] + numbers, before[1] + numbers * np.dtype(array["dtype"]).itemsize
    return [(name, numbers, size) for name, (numbers, size) in found.items()]


def broken(directory: Path, step: int, say: Progress = lambda text: None) -> list[str]:
    """Everything that is wrong with the files of a checkpoint whose manifest can be read; empty if it is as it was written.

    Raises:
        CheckpointError: if there is no such checkpoint, or its manifest is damaged.
    """
    listed = read_manifest(directory, step)["files"]
    size = sum(entry["bytes"] for entry in listed.values())
    say(f"reading {len(listed)} files, {size / 2**20:,.1f} MiB")
    path = directory / str(step) / fmt.ARRAYS
    others = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    return fmt.damage(path, listed) + [f"file {fmt.ARRAYS}/{name} was not written with the others" for name in others if name not in listed]


def read_arrays(directory: Path, step: int, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays of a checkpoint in host memory, one at a time."""
    manifest = read_manifest(directory, step)
    path = (directory / str(step) / fmt.ARRAYS).absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        for name in names:
            array = manifest["arrays"][name]
            item = {name: np.empty(array["shape"], np.dtype(array["dtype"]))}
            arguments = ocp.args.PyTreeRestore(
                item=item, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
            )
            yield name, np.asarray(reader.restore(path, args=arguments)[name])


def compare(a: tuple[Path, int], b: tuple[Path, int], say: Progress = lambda text: None) -> Comparison:
    """Two checkpoints, each a directory of checkpoints and a step. Holds two arrays at a time.

    Raises:
        CheckpointError: if one of them cannot be read.
    """
    first, second = read_manifest(*a), read_manifest(*b)
    mine, other = first["arrays"], second["arrays"]
    common = [name for name in mine if name in other]
    same = [name for name in common if mine[name] == other[name]]
    changes, pairs = [], zip(read_arrays(*a, same), read_arrays(*b, same), strict=True)
    for done, ((name, old), (_, new)) in enumerate(pairs, start=1):
        say(f"array {done} of {len(same)}: {name}")
        if not np.array_equal(old, new, equal_nan=np.issubdtype(old.dtype, np.floating)):
            gap = float(np.nanmax(np.abs(old.astype(np.float64) - new.astype(np.float64))))
            changes.append(Change(name, gap, gap / max(float(np.nanmax(np.abs(old.astype(np.float64)))), 1e-30)))
    return Comparison(
        only_a=tuple(name for name in mine if name not in other),
        only_b=tuple(name for name in other if name not in mine),
        shapes=tuple(f"{name}: {form(mine[name])} -> {form(other[name])}" for name in common if name not in same),
        settings=tuple(_settings(first.get("config", {}), second.get("config", {}))),
        changes=tuple(changes),
        equal=len(same) - len(changes),
    )


def _settings(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """Settings that differ, as they are typed."""
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _settings(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}: {before} -> {after}"
