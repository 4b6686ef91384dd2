"""The table of GPUs."""

import pytest

from moejax.errors import ConfigError
from moejax.plan.gpus import GPUS, find_gpu, target_config


def test_each_gpu_is_found_by_its_name_in_any_case():
    assert [find_gpu(name.upper()).arch for name in GPUS] == ["sm_90a", "sm_90a", "sm_100a", "sm_103a", "sm_100a", "sm_103a"]


def test_an_unknown_gpu_is_refused_with_the_names():
    with pytest.raises(ConfigError, match=r"gpu=a100 is not in the table; use one of h100, h200, b200, b300, gb200, gb300, or add it to"):
        find_gpu("a100")
    with pytest.raises(ConfigError, match=r"gpu=gh200 is not in the table; the nearest is h200; use one of"):
        find_gpu("gh200")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_clocks_and_tensor_cores_give_the_data_sheets_rate_within_a_tenth(gpu):
    """Two independent sources of the same number: XLA's description, and NVIDIA's data sheet."""
    of_clock = 2 * gpu.cores * 4 * gpu.matrix_ops / 2 * gpu.matrix_clock_ghz * 1e9
    assert of_clock == pytest.approx(gpu.bf16_flops, rel=0.1)


def test_the_description_names_the_device_and_its_memory():
    text = target_config(find_gpu("b300"))
    assert 'device_description_str: "NVIDIA B300"' in text
    assert "major: 10 minor: 3 feature_extension: ACCELERATED_FEATURES" in text
    assert "device_memory_size: 297021865984" in text
    assert text.count("{") == text.count("}")
