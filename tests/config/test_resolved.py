import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import CONFIG_FILE, TrainConfig, differences, from_dict, from_json, load_config, read_config, to_dict, to_json
from moejax.config.resolved import on_any_device
from moejax.config.settings import choices, item_type, options, settings
from moejax.errors import ConfigError
from tests.config.change import change

BASE = load_config("tiny_cpu")
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a setting's type."""
    if item_type(hint) is not None:
        return st.lists(values(item_type(hint)), max_size=3).map(tuple)
    if choices(hint):
        return st.sampled_from(choices(hint))
    kinds = {int: st.integers(), float: FINITE, bool: st.booleans(), str: st.text(), type(None): st.none()}
    return st.one_of([kinds[option] for option in options(hint)])


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Valid configs: arbitrary changes of a few settings, kept where the rules allow them."""
    every = list(settings(BASE))
    config = BASE
    for setting in draw(st.lists(st.sampled_from(every), max_size=8)):
        try:
            config = change(config, {setting.name: draw(values(setting.hint))})
        except ConfigError:
            continue
    return config


@given(configs())
def test_json_round_trip_is_exact(config: TrainConfig) -> None:
    assert from_json(to_json(config)) == config
    assert repr(from_dict(to_dict(config))) == repr(config)


@pytest.mark.parametrize("name", ["quickstart", "tiny_cpu", "shakespeare_moe", "shakespeare_dense"])
def test_shipped_configs_round_trip(name: str) -> None:
    config = load_config(name)
    assert from_json(to_json(config)) == config


def test_json_says_its_version_and_reads_like_the_settings() -> None:
    saved = json.loads(to_json(BASE))
    assert saved["config_version"] == 1
    assert saved["model"]["moe"]["num_experts"] == 8
    assert saved["model"]["attention"]["window_pattern"] == [16, -1]


def test_whole_numbers_of_number_settings_compare_equal_when_read_back() -> None:
    config = change(BASE, {"optim.lr": 1})
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"config_version": 2}, "config_version=2 of the saved config is not 1"),
        ({"config_version": None}, "config_version=None of the saved config is not 1"),
        ({"sheed": 3}, "unknown sheed; use the moejax that wrote it"),
        ({"model": {"moe": {}}}, "missing model.vocab_size, model.embed_dim"),
        ({"mesh": {"dp": 1, "ep": 1, "tp": 2}}, "unknown mesh.tp"),
        ({"steps": "10"}, "steps='10' of the saved config is not a whole number"),
        ({"steps": True}, "steps=True of the saved config is not a whole number"),
        ({"mesh": None}, "mesh=None of the saved config is not MeshConfig"),
        ({"steps": 0}, "steps=0 is below 1"),
    ],
)
def test_saved_config_that_does_not_fit_is_refused_by_name(edit: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(to_dict(BASE) | edit)
    assert message in str(caught.value)


def test_missing_setting_is_refused_by_name() -> None:
    saved = to_dict(BASE)
    del saved["model"]["moe"]["top_k"]
    with pytest.raises(ConfigError, match=r"missing model\.moe\.top_k; use the moejax that wrote it"):
        from_dict(saved)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "is list in JSON")])
def test_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(to_json(BASE).encode() + b"\xff")
    with pytest.raises(ConfigError, match=r"config\.json: the saved config is not UTF-8 text .*; restore it from a copy"):
        read_config(tmp_path)


def test_config_is_read_from_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(to_json(BASE))
    assert read_config(tmp_path) == BASE
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_config(tmp_path / "nowhere")


def test_differences_are_listed_with_dotted_names() -> None:
    other = load_config("tiny_cpu", ["--mesh.ep", "2", "--model.moe.top-k", "4", "--data.document-mask", "False"])
    assert differences(BASE, other) == ["model.moe.top_k: 2 -> 4", "mesh.ep: 1 -> 2", "data.document_mask: True -> False"]
    assert differences(BASE, BASE) == []


def test_a_group_that_only_one_config_has_is_one_difference() -> None:
    dense = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, moe=None, num_dense_layers=3))
    lines = differences(BASE, dense)
    assert lines[0] == "model.num_dense_layers: 1 -> 3"
    assert lines[1].startswith("model.moe: MoEConfig(num_experts=8")
    assert lines[1].endswith("-> None")
    assert len(lines) == 2


def test_a_checkpoint_is_read_with_the_kernels_of_the_device_at_hand() -> None:
    named = change(BASE, {"model.moe.transport": "ragged", "model.moe.grouped_matmul": "mosaic", "model.attention.implementation": "cudnn"})
    assert on_any_device(named) == BASE
    dense = change(BASE, {"model.moe": None, "model.num_dense_layers": BASE.model.num_layers, "model.mlp_dim": 8, "mesh.ep": 1})
    assert on_any_device(dense) == dense
