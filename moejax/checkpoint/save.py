"""Writes checkpoints in the background, one at a time, and keeps the newest."""

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from moejax.checkpoint import format as fmt
from moejax.checkpoint.restore import committed_steps
from moejax.errors import CheckpointError

_SPARE = 1.05  # for manifests, and what file systems take for themselves


class Writer:
    """Owns a directory of checkpoints while a run writes them.

    Opening it removes what an interrupted save left behind; the caller makes sure that nobody else writes there.
    """

    def __init__(self, directory: Path, *, keep: int, keep_every: int | None = None):
        """Keeps the newest `keep` checkpoints, and those whose step is a multiple of `keep_every`."""
        self._directory = directory.absolute()
        self._keep, self._keep_every = keep, keep_every
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future[float]] | None = None
        for leftover in self._directory.glob(f"*{fmt.PARTIAL}"):
            shutil.rmtree(leftover)
        self._orbax = ocp.StandardCheckpointer()

    def save(self, step: int, tree: Any, about: dict[str, Any]) -> None:
        """Start to write nested dicts of global arrays as checkpoint `step`; waits for the save before it.

        The arrays may be donated to a computation as soon as this returns: Orbax holds or has copied their buffers.

        `about` is what the manifest says beside arrays, files and versions (config, tokens seen): JSON values.

        Raises:
            CheckpointError: if this save cannot start, or the one before it failed.
        """
        self.wait()
        started = time.perf_counter()
        flat = fmt.flat_names(tree)
        partial = self._directory / f"{step}{fmt.PARTIAL}"
        try:
            partial.mkdir(parents=True)
            _check_room(self._directory, flat)
            self._orbax.save(partial / fmt.ARRAYS, flat)
        except OSError as error:
            raise _failed(step, self._directory, error) from error
        manifest = {"format": fmt.FORMAT, "step": step} | about | {"versions": fmt.versions(), "arrays": fmt.describe_arrays(flat)}
        self._pending = (step, self._pool.submit(self._commit, step, manifest, started))

    def poll(self) -> tuple[int, float] | None:
        """Step and seconds of a save that has finished since the last call, without waiting.

        Raises:
            CheckpointError: if the save failed.
        """
        return self.wait() if self.is_idle() else None

    def is_idle(self) -> bool:
        """Whether no save is in progress."""
        return self._pending is None or self._pending[1].done()

    def wait(self) -> tuple[int, float] | None:
        """The same as poll, after waiting for the save in progress."""
        if self._pending is None:
            return None
        (step, future), self._pending = self._pending, None
        error = future.exception()
        if error is not None:
            raise _failed(step, self._directory, error) from error
        return step, future.result()

    def close(self) -> None:
        """Wait for the save in progress, whatever comes of it, and let the threads go."""
        self._pool.shutdown()
        self._orbax.close()

    def _commit(self, step: int, manifest: dict[str, Any], started: float) -> float:
        self._orbax.wait_until_finished()
        partial = self._directory / f"{step}{fmt.PARTIAL}"
        with (partial / fmt.MANIFEST).open("x") as file:
            json.dump(fmt.seal(manifest | {"files": fmt.describe_files(partial / fmt.ARRAYS)}), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._directory / str(step))
        for old in doomed(committed_steps(self._directory), keep=self._keep, keep_every=self._keep_every):
            delete(self._directory, old)
        return time.perf_counter() - started


def doomed(steps: Sequence[int], *, keep: int, keep_every: int | None = None) -> list[int]:
    """Which checkpoints do not stay: all but the newest `keep`, and those whose step is a multiple of `keep_every`; oldest first."""
    ordered = sorted(steps)
    return [step for step in ordered[: max(0, len(ordered) - keep)] if keep_every is None or step % keep_every]


def delete(directory: Path, step: int) -> None:
    """Delete a checkpoint, so that an interruption leaves nothing that looks like one."""
    shutil.rmtree((directory / str(step)).rename(directory / f"{step}{fmt.PARTIAL}"))


def _check_room(directory: Path, flat: dict[str, Any]) -> None:
    """Refuse a save that cannot end well before it takes what room there is."""
    needed = int(_SPARE * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in flat.values()))
    if (free := shutil.disk_usage(directory).free) < needed:
        raise OSError(f"it needs {needed / 2**30:.3f} GiB, and {free / 2**30:.3f} GiB are free")


def _failed(step: int, directory: Path, error: BaseException) -> CheckpointError:
    kept = committed_steps(directory)
    rest = f"checkpoint {kept[-1]} is intact" if kept else "there is no older one"
    return CheckpointError(
        f"checkpoint {step} could not be written to {directory}: {type(error).__name__}: {_shorten(error)}; {rest}; "
        "make room or fix the permissions there, then start the same command again"
    )


def _shorten(error: BaseException) -> str:
    """First line of the message; of a long one the beginning and the end, where TensorStore names the cause."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-180:]}"
