"""A run that cannot fit into this machine is refused before anything is allocated."""

import types

import pytest

from moejax.config import load_config
from moejax.errors import ConfigError
from moejax.plan import room
from moejax.plan.estimate import memory_bytes
from moejax.plan.room import check_room, host_bytes

GIB = 2**30


def fake_gpu(limit: int | None):
    return types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: None if limit is None else {"bytes_limit": limit}
    )


def test_a_model_of_gpus_is_refused_on_a_cpu_with_both_figures(monkeypatch):
    monkeypatch.setattr(room, "host_bytes", lambda: 24 * GIB)
    with pytest.raises(
        ConfigError, match=r"eight_layers needs about 8 x \d+\.\d GiB of memory .*, but this machine has 24.0; take a smaller"
    ):
        check_room(load_config("eight_layers"))


@pytest.mark.parametrize("name", ["quickstart", "tiny_cpu", "shakespeare_moe", "shakespeare_dense"])
def test_what_is_made_for_a_cpu_needs_little(name, monkeypatch):
    monkeypatch.setattr(room, "host_bytes", lambda: 2 * GIB)
    check_room(load_config(name))


def test_on_a_gpu_what_jax_may_use_of_it_counts(monkeypatch):
    config = load_config("eight_layers")
    need = sum(memory_bytes(config).values())
    monkeypatch.setattr(room.jax, "local_devices", lambda: [fake_gpu(int(need / room.TOO_HIGH) - GIB)] * 8)
    with pytest.raises(ConfigError, match=r"GiB for each device of memory .* is what JAX may use of one NVIDIA H200; "):
        check_room(config)
    monkeypatch.setattr(room.jax, "local_devices", lambda: [fake_gpu(int(need / room.TOO_HIGH) + GIB)] * 8)
    check_room(config)
    monkeypatch.setattr(room.jax, "local_devices", lambda: [fake_gpu(None)] * 8)
    check_room(config)


def test_a_container_has_no_more_than_its_limit(monkeypatch, tmp_path):
    (tmp_path / "max").write_text("1234\n")
    (tmp_path / "none").write_text("max\n")
    whole = host_bytes()
    monkeypatch.setattr(room, "_LIMITS", (tmp_path / "max", tmp_path / "none", tmp_path / "absent"))
    assert host_bytes() == 1234 < whole
