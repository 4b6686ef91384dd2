"""Settings of a run as frozen dataclasses. Importing this needs only the standard library."""

from moejax.config.load import load_config
from moejax.config.model import RESIDUALS, SYSTEM_REFERENCE, AttentionConfig, ModelConfig, MoEConfig, RouterConfig
from moejax.config.pending import pending, refuse_pending
from moejax.config.resolved import CONFIG_FILE, differences, from_dict, from_json, read_config, to_dict, to_json
from moejax.config.train import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "CONFIG_FILE",
    "RESIDUALS",
    "SYSTEM_REFERENCE",
    "AttentionConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "RouterConfig",
    "ScheduleConfig",
    "TrainConfig",
    "differences",
    "from_dict",
    "from_json",
    "load_config",
    "pending",
    "read_config",
    "refuse_pending",
    "to_dict",
    "to_json",
]
