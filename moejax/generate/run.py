"""Continue prompts with the model of a run directory."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import MeshConfig
from moejax.config.resolved import on_any_device, read_config
from moejax.data import open_data
from moejax.errors import ConfigError
from moejax.generate.sample import make_sampler
from moejax.parallel import make_mesh
from moejax.train.restore import restore_parameters


def run_generate(
    run_dir: Path,
    *,
    prompts: list[str],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    num_samples: int,
    step: int | None,
) -> list[str]:
    """Texts, each prompt followed by its continuation up to the end of the document; num_samples of every prompt in turn.

    Runs on one device whatever mesh trained the run.

    Raises:
        CheckpointError: if there is no such checkpoint or it cannot be read.
        ConfigError: if the run has no tokenizer, or a prompt is empty.
    """
    config = dataclasses.replace(on_any_device(read_config(run_dir)), mesh=MeshConfig())
    tokenizer = open_data(config).tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"data.source={config.data.source} gives token ids without a tokenizer, so a text prompt cannot be read; "
            "only runs with data.source=shakespeare have one. moejax eval measures any run"
        )
    mesh = make_mesh(config.mesh)
    params, router, _ = restore_parameters(config, mesh, run_dir, step)
    sampler = make_sampler(config, mesh, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    texts = []
    for number, prompt in enumerate(prompts):
        ids = np.asarray(tokenizer.encode(prompt), np.int32)
        if ids.size == 0:
            raise ConfigError('prompt="" is empty; give at least one character to continue')
        key = jax.random.fold_in(jax.random.key(seed), number)
        drawn = np.asarray(sampler(params, router, jnp.tile(ids, (num_samples, 1)), key))
        texts += [prompt + tokenizer.decode(_until(row, tokenizer.eos_id)) for row in drawn]
    return texts


def _until(row: np.ndarray, end: int) -> list[int]:
    """The ids before the first `end`."""
    ends = np.flatnonzero(row == end)
    return row[: ends[0] if ends.size else None].tolist()
