"""GPU kernels run on a CPU by Pallas' interpreter, which also reports races, reads out of bounds and barriers left over.

It fills memory that nobody wrote with NaN, so a result that a kernel forgets is seen.
"""

import contextlib
from collections.abc import Iterator

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice

from moejax_kernels import device

GPUS = {"sm90": "NVIDIA H200", "sm100": "NVIDIA B200"}


@contextlib.contextmanager
def traced_as_if_on(gpu: str, cores: int, *, detect_races: bool = True) -> Iterator[None]:
    """What is traced inside sees this GPU with so many cores; its kernels will be interpreted."""
    described = AbstractDevice(device_kind=gpu, num_cores=cores, platform="gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "abstract_device", lambda: described)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
            yield
