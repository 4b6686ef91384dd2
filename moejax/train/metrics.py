"""Metrics from device arrays to records, and the file that keeps them.

metrics.jsonl holds one JSON object per line, each with "kind" and "step" (steps finished):

    train   every step: the step's scalars, tokens_seen; on logged steps also lists (expert load), speed/* and memory/*
    eval    results of an evaluation           save   seconds of a checkpoint, from asking for it to its final name
    start   a process begins or resumes: compile seconds, parameters, FLOPs per token, devices

Numbers that are not finite are null.
"""

import json
import os
import resource
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Reading:
    """Metrics of one step on the host."""

    step: int
    metrics: dict[str, Any]


@dataclass
class LateMetrics:
    """Metrics of steps that have been enqueued, read in order while the device works on later ones."""

    waiting: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)

    def push(self, step: int, metrics: dict[str, Any]) -> None:
        self.waiting.append((step, metrics))

    def read(self, through: int) -> list[Reading]:
        """Every step up to `through`, waiting for it; and later ones that are ready, but never touch the newest."""
        readings = []
        while self.waiting:
            step, metrics = self.waiting[0]
            is_due = step <= through
            if not is_due and (len(self.waiting) == 1 or not all(leaf.is_ready() for leaf in metrics.values())):
                break
            self.waiting.popleft()
            readings.append(Reading(step, jax.device_get(metrics)))
        return readings


def scalars(metrics: dict[str, Any]) -> dict[str, float | int | None]:
    """The metrics that are single numbers, as JSON numbers."""
    return {name: _number(value) for name, value in metrics.items() if np.ndim(value) == 0}


def lists(metrics: dict[str, Any]) -> dict[str, list[Any]]:
    """The metrics that are arrays, as nested lists with five decimals."""
    return {name: np.round(np.asarray(value, np.float64), 5).tolist() for name, value in metrics.items() if np.ndim(value) > 0}


def memory() -> dict[str, int]:
    """Bytes in use: of this process on the host, and of the fullest device where the platform counts them."""
    counted = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    result = {"memory/host_bytes": _resident_bytes()}
    for name, key in (
        ("memory/device_bytes", "bytes_in_use"),
        ("memory/device_peak_bytes", "peak_bytes_in_use"),
        ("memory/device_limit_bytes", "bytes_limit"),
    ):
        values = [stats[key] for stats in counted if key in stats]
        if values:
            result[name] = max(values)
    return result


def as_line(record: dict[str, Any]) -> str:
    """One line of the metrics file."""
    return json.dumps(record, allow_nan=False) + "\n"


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file; a last line cut short by a crash is left out, and so are lines that are no records."""
    if not path.exists():
        return []
    records = map(_record, path.read_bytes().split(b"\n")[:-1])
    return [record for record in records if record is not None]


def drop_after(path: Path, step: int) -> None:
    """Keep what happened up to a step, so that a run resumed there records every step once."""
    kept = [record for record in read_records(path) if record["step"] < step or (record["step"] == step and record["kind"] != "start")]
    replacement = path.with_suffix(".new")
    replacement.write_text("".join(map(as_line, kept)))
    replacement.replace(path)


def _record(line: bytes) -> dict[str, Any] | None:
    """None for a line that a disk or an editor has damaged: measurements are not worth stopping a run for."""
    try:
        record = json.loads(line.decode())
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)
    return record if is_record else None


def _number(value: Any) -> float | int | None:
    value = np.asarray(value)
    if np.issubdtype(value.dtype, np.integer):
        return int(value)
    if not np.isfinite(value):
        return None
    return float(str(value))  # the shortest digits that give this float32 back


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
