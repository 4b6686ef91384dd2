"""Text from a run directory, with a model whose weights spell out what follows each letter."""

import dataclasses

import numpy as np
import pytest

from moejax.config import DataConfig, MeshConfig
from moejax.data.tokenizer import ByteTokenizer
from moejax.errors import CheckpointError, ConfigError
from moejax.generate import run_generate
from tests.oracle.examples import model_config, parameters, train_config
from tests.train.saved_run import save_run

END = ByteTokenizer.eos_id
FOLLOWERS = {"a": ["b"], "b": ["c"], "c": [END], "d": ["e", "f"], "e": [END], "f": [END], "g": ["g"], "h": [END]}
"""Tokens that follow each letter, equally likely; after any other token, every token is."""

MODEL = model_config(vocab_size=300, num_layers=1, num_dense_layers=1, mlp_dim=8)
CONFIG = dataclasses.replace(train_config(MODEL), data=DataConfig(seq_len=5), mesh=MeshConfig(dp=4))
SETTINGS = {"max_new_tokens": 7, "temperature": 0.0, "top_p": 1.0, "seed": 0, "num_samples": 1, "step": None}


def spelling_model(followers):
    """Each letter has a direction of its own, which no block changes; the head maps it to its followers."""
    params = parameters(MODEL)
    for folder, name in (("attention", "w_o"), ("mlp", "w_out")):
        params["dense_blocks"][folder][name][:] = 0
    params["embed"]["w_embed"][:] = 0
    params["head"]["w_head"][:] = 0
    params["head"]["norm"]["scale"][:] = 1
    for place, (letter, next_tokens) in enumerate(followers.items()):
        params["embed"]["w_embed"][ord(letter), place] = 1
        for token in next_tokens:
            params["head"]["w_head"][place, token if token == END else ord(token)] = 10
    return params


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    masters = {1: spelling_model({"a": ["z"], "z": [END]}), 2: spelling_model(FOLLOWERS)}
    return save_run(tmp_path_factory.mktemp("run"), CONFIG, masters)


def texts(run_dir, *prompts, **changes):
    return run_generate(run_dir, prompts=list(prompts), **(SETTINGS | changes))


def test_text_stops_at_the_end_of_the_document_or_after_max_new_tokens(run_dir):
    """One prompt ends at once."""
    assert texts(run_dir, "a", "h", "g") == ["abc", "h", "g" + 7 * "g"]


def test_samples_of_a_prompt_differ_and_the_seed_repeats_them(run_dir):
    first = texts(run_dir, "d", temperature=1.0, num_samples=16)
    assert set(first) == {"de", "df"}
    assert texts(run_dir, "d", temperature=1.0, num_samples=16) == first
    assert texts(run_dir, "d", temperature=1.0, num_samples=16, seed=1) != first


def test_an_older_checkpoint_can_be_asked_for(run_dir):
    assert texts(run_dir, "xyza", step=1) == ["xyzaz"]


def test_a_step_that_was_not_saved_is_refused(run_dir):
    with pytest.raises(CheckpointError, match="3"):
        texts(run_dir, "a", step=3)


def test_an_empty_prompt_is_refused(run_dir):
    with pytest.raises(ConfigError, match='prompt="" is empty; give at least one character to continue'):
        texts(run_dir, "")


def test_a_run_without_a_tokenizer_is_refused(tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(500, np.uint16))
    data = DataConfig(source="files", paths=(str(tmp_path / "tokens.npy"),), seq_len=5)
    save_run(tmp_path / "run", dataclasses.replace(CONFIG, data=data), {1: spelling_model(FOLLOWERS)})
    with pytest.raises(ConfigError, match=r"data\.source=files gives token ids without a tokenizer"):
        texts(tmp_path / "run", "a")
