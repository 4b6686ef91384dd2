"""Parameters of a checkpoint, without the optimizer, for evaluation and generation."""

from pathlib import Path

from jax.sharding import Mesh

from moejax import checkpoint
from moejax.config import TrainConfig
from moejax.errors import CheckpointError
from moejax.train.durable import abstract_durable, placed
from moejax.train.state import make_parameters


def restore_parameters(config: TrainConfig, mesh: Mesh, run_dir: Path, step: int | None) -> tuple[dict, dict, int]:
    """Compute-dtype parameters, router state and step of a checkpoint, on any mesh. `step` None takes the newest.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    folder = run_dir / "checkpoints"
    steps = checkpoint.committed_steps(folder)
    if not steps:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; train it first, or wait for the first save")
    step = steps[-1] if step is None else step
    wanted = abstract_durable(config, mesh)
    saved = placed(config, mesh, checkpoint.restore(folder, step, {name: wanted[name] for name in ("master", "router")}))
    return make_parameters(config, mesh, saved["master"]), saved["router"], step
