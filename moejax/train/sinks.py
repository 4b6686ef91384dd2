"""Where records go: always metrics.jsonl, and TensorBoard or Weights & Biases if asked for."""

import importlib.util
import secrets
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from moejax.config import LogConfig, TrainConfig
from moejax.config.check import check
from moejax.config.resolved import to_dict
from moejax.train.metrics import as_line
from moejax.train.run_dir import Run, writing


@runtime_checkable
class Sink(Protocol):
    def write(self, record: dict[str, Any], *, is_logged: bool) -> None:
        """Take a record; is_logged: it is not one of the steps between logged ones."""

    def close(self) -> None: ...


def require_sinks(log: LogConfig) -> None:
    """Refuse a sink whose package is not installed."""
    for wanted, setting, package, extra in (
        (log.tensorboard, "log.tensorboard=True", "tensorboardX", "tensorboard"),
        (log.wandb_project is not None, f"log.wandb_project={log.wandb_project}", "wandb", "wandb"),
    ):
        is_there = not wanted or importlib.util.find_spec(package) is not None
        check(
            is_there,
            f"{setting} needs the package {package}, which is not installed; pip install 'moejax[{extra}]', or leave the setting out",
        )


def open_sinks(config: TrainConfig, run: Run) -> list[Sink]:
    sinks: list[Sink] = [JsonLines(run.metrics)]
    if config.log.tensorboard:
        sinks.append(TensorBoard(run))
    if config.log.wandb_project is not None:
        sinks.append(WandB(config, config.log.wandb_project, run))
    return sinks


class JsonLines:
    """Appends every record to a file, each with one write, so that a crash cuts at most the last line short."""

    def __init__(self, path: Path):
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, record: dict[str, Any], *, is_logged: bool) -> None:
        with writing(self._path):
            self._file.write(as_line(record).encode())

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars of logged steps and evaluations in run_dir/tensorboard."""

    def __init__(self, run: Run):
        from tensorboardX import SummaryWriter

        # After a resume, TensorBoard drops what an earlier process wrote for later steps.
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=run.done + 1)

    def write(self, record: dict[str, Any], *, is_logged: bool) -> None:
        if is_logged:
            for name, value in _numbers(record).items():
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """The same numbers in a Weights & Biases run; a resumed run continues the one it was."""

    def __init__(self, config: TrainConfig, project: str, run: Run):
        import wandb

        known = run.path / "wandb_id"
        if run.step is None or not known.exists():
            known.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=project, name=config.name, id=known.read_text(), resume="allow", dir=str(run.path), config=to_dict(config)
        )

    def write(self, record: dict[str, Any], *, is_logged: bool) -> None:
        if is_logged:
            self._run.log(_numbers(record) | {"step": record["step"]})

    def close(self) -> None:
        self._run.finish()


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if "/" in name and isinstance(value, int | float)}
