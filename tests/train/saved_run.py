"""A run directory with checkpoints of given parameters, as training would have left it."""

from pathlib import Path

import numpy as np

from moejax.checkpoint import Writer
from moejax.config import CONFIG_FILE, TrainConfig, to_json


def save_run(folder: Path, config: TrainConfig, masters: dict[int, dict]) -> Path:
    """Write the config, and for each step a checkpoint of these masters; its router biases are all equal to the step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(to_json(config))
    writer = Writer(folder / "checkpoints", keep=len(masters))
    for step, master in masters.items():
        writer.save(step, {"master": master, "router": router_at(config, step), "step": np.int32(step)}, {})
    writer.wait()
    writer.close()
    return folder


def router_at(config: TrainConfig, step: int) -> dict:
    """Router state of such a checkpoint."""
    if config.model.moe is None:
        return {}
    return {"bias": np.full((config.model.num_moe_layers, config.model.moe.num_experts), step, np.float32)}
