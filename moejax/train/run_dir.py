"""The directory of a run: who may use it, and whether training there starts fresh, resumes or is refused.

config.json      resolved settings        metrics.jsonl   see metrics.py        run.png   picture.py
checkpoints/     moejax.checkpoint        profile/        with --profile        lock      held while a process trains
"""

import contextlib
import fcntl
import os
import platform
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from moejax.checkpoint import committed_steps, read_manifest
from moejax.config import TrainConfig
from moejax.config.resolved import CONFIG_FILE, differences, read_config, to_json
from moejax.errors import CheckpointError
from moejax.train.metrics import METRICS_FILE, drop_after

_LOCK = "lock"
_NEW_CONFIG = f"{CONFIG_FILE}.new"
# How a run is carried out rather than what it computes. They may change from one process of a run to the next.
_EXECUTION = ("mesh.", "microbatches", "steps", "log.", "checkpoint.", "eval.", "profile", "resume", "run_dir", "model.recompute")


@dataclass(frozen=True, kw_only=True)
class Run:
    path: Path
    step: int | None
    """Checkpoint to go on from; None: start from step 0."""
    tokens_seen: int
    """Tokens trained on up to that checkpoint."""
    notes: tuple[str, ...]
    """Sentences for the user on what was found and what follows."""

    @property
    def done(self) -> int:
        """Steps done before this process."""
        return self.step or 0

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS_FILE


@contextlib.contextmanager
def open_run(config: TrainConfig) -> Generator[Run]:
    """Find out what the run directory allows, and hold it against other processes. Changes nothing in it but the lock.

    Raises:
        CheckpointError: if it belongs to something else, to another config, to a running process, or cannot be read.
    """
    path = run_path(config)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"run directory {path} is a file; remove it or give another --run-dir")
    if not (path / CONFIG_FILE).exists() and _foreign(path):
        raise CheckpointError(
            f"run directory {path} is not empty ({_foreign(path)[0]}, ...) and holds no run; give an empty or new --run-dir"
        )
    with _locked(path):
        yield _examine(config, path)


def begin(run: Run, config: TrainConfig) -> None:
    """Make the directory this process's: settings as they are now, metrics only up to the step it goes on from."""
    new = run.path / _NEW_CONFIG
    with writing(run.path):
        new.write_text(to_json(config))
        new.replace(run.path / CONFIG_FILE)
        drop_after(run.metrics, run.done)


@contextlib.contextmanager
def writing(path: Path) -> Generator[None]:
    """Say what to do when the disk refuses."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}); make room or fix the permissions there, or give another --run-dir"
        ) from error


def run_path(config: TrainConfig) -> Path:
    return Path("runs") / config.name if config.run_dir is None else Path(config.run_dir).expanduser()


def _foreign(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name not in (_LOCK, _NEW_CONFIG)) if path.is_dir() else []


def _examine(config: TrainConfig, path: Path) -> Run:
    if not (path / CONFIG_FILE).exists():
        return Run(path=path, step=None, tokens_seen=0, notes=(f"new run in {path}",))
    steps = committed_steps(path / "checkpoints")
    newest = f"checkpoint {steps[-1]}" if steps else "no checkpoint yet"
    if config.resume == "never":
        raise CheckpointError(
            f"resume=never, but run directory {path} is in use ({newest}); give another --run-dir, or --resume auto to continue it"
        )
    notes = _compare(config, path, newest)
    if not steps:
        return Run(
            path=path,
            step=None,
            tokens_seen=0,
            notes=(f"run in {path} stopped before its first checkpoint: starting again from step 0", *notes),
        )
    manifest = read_manifest(path / "checkpoints", steps[-1])
    return Run(
        path=path, step=steps[-1], tokens_seen=manifest["tokens_seen"], notes=(f"resuming {path} from checkpoint {steps[-1]}", *notes)
    )


def _compare(config: TrainConfig, path: Path, newest: str) -> list[str]:
    """Say what is different from the run's last settings; refuse what would make it another run."""
    changed = differences(read_config(path), config)
    essential = [line for line in changed if not line.startswith(_EXECUTION)]
    if essential and config.resume != "changed":
        listing = "".join(f"\n  {line}" for line in essential)
        raise CheckpointError(
            f"run directory {path} holds a run of another config ({newest}); settings that differ (there -> here):{listing}\n"
            "give a new --run-dir to start another run, --resume changed to continue this one with the new settings, or set them back"
        )
    hidden = ("resume", "run_dir")
    shown = [line for line in changed if not line.startswith(hidden)]
    return [f"changed since the last start: {line}" for line in shown]


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the directory. The operating system lets go of the lock when a process ends in any way, so none is ever stale."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        file = (path / _LOCK).open("a+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode().strip() or "another process"
            raise CheckpointError(f"run directory {path} is in use by {holder}; stop that one first, or give another --run-dir") from error
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n".encode())
        yield
