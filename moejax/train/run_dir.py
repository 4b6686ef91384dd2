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
_EXECUTION_GROUPS = ("mesh.", "log.", "checkpoint.", "eval.")
_EXECUTION = (
    *("microbatches", "steps", "profile", "debug_nans", "resume", "run_dir"),
    *("model.recompute", "model.recompute_keep", "model.moe.grouped_matmul", "model.moe.transport"),
    *("model.attention.implementation", "data.max_documents"),
)
_HIDDEN = ("resume", "run_dir")


@dataclass(frozen=True, kw_only=True)
class Run:
    path: Path
    step: int | None
    """Checkpoint to go on from; None: start from step 0."""
    tokens_seen: int = 0
    """Tokens trained on up to that checkpoint."""
    samples_seen: int = 0
    """Sequences trained on up to that checkpoint: the number of the next one, also when the batch size changes."""
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

    A directory that did not exist before goes away again unless something begins there.

    Raises:
        CheckpointError: if it belongs to something else, to another config, to a running process, or cannot be read.
    """
    path = run_path(config)
    with writing(path):
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
    """Where a config's run lives.

    Raises:
        CheckpointError: if run_dir begins with the home of an unknown user.
    """
    try:
        return Path("runs") / config.name if config.run_dir is None else Path(config.run_dir).expanduser()
    except RuntimeError as error:
        raise CheckpointError(
            f"run_dir={config.run_dir} begins with the home of a user that does not exist here; write the whole path"
        ) from error


def _foreign(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name not in (_LOCK, _NEW_CONFIG)) if path.is_dir() else []


def _examine(config: TrainConfig, path: Path) -> Run:
    if not (path / CONFIG_FILE).exists():
        return Run(path=path, step=None, notes=(f"new run in {path}",))
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
            notes=(f"run in {path} stopped before its first checkpoint: starting again from step 0", *notes),
        )
    manifest = read_manifest(path / "checkpoints", steps[-1])
    return Run(
        path=path,
        step=steps[-1],
        tokens_seen=manifest["tokens_seen"],
        samples_seen=manifest["samples_seen"],
        notes=(f"resuming {path} from checkpoint {steps[-1]}", *notes),
    )


def _compare(config: TrainConfig, path: Path, newest: str) -> list[str]:
    """Say what is different from the run's last settings; refuse what would make it another run."""
    changed = differences(read_config(path), config)
    names = [line.partition(":")[0] for line in changed]
    essential = [line for line, name in zip(changed, names, strict=True) if not _is_execution(name)]
    if essential and config.resume != "changed":
        listing = "".join(f"\n  {line}" for line in essential)
        raise CheckpointError(
            f"run directory {path} holds a run of another config ({newest}); settings that differ (there -> here):{listing}\n"
            "give a new --run-dir to start another run, --resume changed to continue this one with the new settings, or set them back"
        )
    return [f"changed since the last start: {line}" for line, name in zip(changed, names, strict=True) if name not in _HIDDEN]


def _is_execution(name: str) -> bool:
    return name in _EXECUTION or name.startswith(_EXECUTION_GROUPS)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the directory. The operating system lets go of the lock when a process ends in any way, so none is ever stale."""
    lock = path / _LOCK
    with writing(path):
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "another process"
            raise CheckpointError(f"run directory {path} is in use by {holder}; stop that one first, or give another --run-dir") from error
        if not _is_in_place(lock, file.fileno()):
            raise CheckpointError(f"run directory {path} was just removed by a start that was refused; start the same command again")
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # such as another process that has come to use the directory
                if is_new and [entry.name for entry in path.iterdir()] == [_LOCK]:
                    lock.unlink()
                    path.rmdir()


def _is_in_place(lock: Path, descriptor: int) -> bool:
    """Whether an open lock is still the one that other processes will find."""
    try:
        return os.path.samestat(lock.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
