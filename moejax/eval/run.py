"""Evaluate a checkpoint of a run directory."""

import dataclasses
from pathlib import Path

from moejax.config import EvalConfig, MeshConfig
from moejax.config.resolved import on_any_device, read_config
from moejax.data import open_data
from moejax.parallel import make_mesh
from moejax.train.evaluate import evaluate, make_eval_step
from moejax.train.restore import restore_parameters


def run_eval(run_dir: Path, *, step: int | None, mesh: MeshConfig, eval: EvalConfig) -> dict[str, float | int]:
    """Held-out loss of one checkpoint, on any mesh.

    Args:
        step: step of the checkpoint; None takes the newest.

    Raises:
        CheckpointError: if there is no such checkpoint or it cannot be read.
        ConfigError: if the batch does not split over the mesh.
    """
    trained = on_any_device(read_config(run_dir))
    size = eval.batch_size or -(-trained.microbatch_size // mesh.data_ranks) * mesh.data_ranks
    settings = dataclasses.replace(eval, batch_size=size)
    config = dataclasses.replace(trained, mesh=mesh, batch_size=mesh.data_ranks, microbatches=1, eval=settings)
    devices = make_mesh(mesh)
    params, router, step = restore_parameters(config, devices, run_dir, step)
    results = evaluate(config, devices, make_eval_step(config, devices), params, router, open_data(config))
    assert results is not None, "nothing stops it"
    return {"step": step} | results
