"""The smallest run whose data can be opened."""

from pathlib import Path

import numpy as np

from moejax.config import AttentionConfig, DataConfig, EvalConfig, ModelConfig, TrainConfig


def tiny_config(*, batch_size: int = 4, seed: int = 0, vocab_size: int = 300, **data) -> TrainConfig:
    """A run with these settings under data."""
    data_config = DataConfig(**data)
    return TrainConfig(
        name="tiny",
        steps=1,
        batch_size=batch_size,
        seed=seed,
        data=data_config,
        eval=EvalConfig(every=500 if data_config.eval_fraction else None),
        model=ModelConfig(
            vocab_size=vocab_size,
            embed_dim=8,
            num_layers=1,
            num_dense_layers=1,
            mlp_dim=8,
            attention=AttentionConfig(num_heads=1),
            moe=None,
        ),
    )


def files_config(folder: Path, *arrays: np.ndarray, **settings) -> TrainConfig:
    """A run over real .npy files of these arrays."""
    paths = []
    for number, array in enumerate(arrays):
        paths.append(str(folder / f"part{number}.npy"))
        np.save(paths[-1], array)
    return tiny_config(source="files", paths=tuple(paths), **settings)
