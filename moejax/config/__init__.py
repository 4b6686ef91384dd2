"""Settings of a run as frozen dataclasses. Importing this needs only the standard library."""

from moejax.config.load import load_config
from moejax.config.model import AttentionConfig, ModelConfig, MoEConfig, RouterConfig
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
    "load_config",
]
