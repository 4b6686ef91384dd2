"""The state of a checkpoint for training, or its parameters alone for evaluation and generation, on any mesh."""

from pathlib import Path

from jax.sharding import Mesh

from moejax import checkpoint
from moejax.config import TrainConfig, read_config
from moejax.errors import CheckpointError
from moejax.parallel import make_mesh
from moejax.train.durable import abstract_durable, from_durable, placed
from moejax.train.state import TrainState, make_parameters


def restore_state(run_dir: Path, mesh: Mesh | None = None, config: TrainConfig | None = None, *, step: int | None = None) -> TrainState:
    """The state of a checkpoint, sharded for `make_train_step(config, mesh)`.

    Args:
        run_dir: what training wrote.
        mesh: one for `config`; None makes it of the first devices. It need not be that of training.
        config: None reads the run's own. Sizes and optimizer have to be those of the run; how it is carried out may differ.
        step: of the checkpoint; None takes the newest.

    Raises:
        CheckpointError: if there is none, it cannot be read, or it is of another model.
        ConfigError: if the run's config cannot be read, or its mesh does not fit the devices.
    """
    config = read_config(run_dir) if config is None else config
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    folder, step = _find(run_dir, step)
    return from_durable(config, mesh, checkpoint.restore(folder, step, abstract_durable(config, mesh)))


def restore_parameters(config: TrainConfig, mesh: Mesh, run_dir: Path, step: int | None) -> tuple[dict, dict, int]:
    """Compute-dtype parameters, router state and step of a checkpoint, on any mesh. `step` None takes the newest.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    folder, step = _find(run_dir, step)
    wanted = abstract_durable(config, mesh)
    saved = placed(config, mesh, checkpoint.restore(folder, step, {name: wanted[name] for name in ("master", "router")}))
    return make_parameters(config, mesh, saved["master"]), saved["router"], step


def _find(run_dir: Path, step: int | None) -> tuple[Path, int]:
    """The directory of a run's checkpoints, and the newest step if none is given."""
    folder = run_dir / "checkpoints"
    steps = checkpoint.committed_steps(folder)
    if not steps:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; train it first, or wait for the first save")
    return folder, steps[-1] if step is None else step
