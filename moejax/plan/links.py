"""Which links the collectives of a step use: NVLink inside a host of eight GPUs, or the network between hosts; bytes that one GPU sends.

A collective over a group with h of its n GPUs on each host, carrying S bytes:

    reduce-scatter, all-gather    a ring: S (n-1)/n over NVLink if h > 1; over the network 1/h of that, for the h GPUs share what crosses
    ragged all-to-all             each row straight to its expert, all equally likely: S (h-1)/n over NVLink, S (n-h)/n over the network
    collective-permute            S to the next stage, on NVLink if that is on the same host
"""

from typing import NamedTuple

import numpy as np

from moejax.config import MeshConfig, TrainConfig
from moejax.parallel.mesh import AXES, mesh_shape
from moejax.plan.formula import Traffic, step_traffic
from moejax.plan.gpus import Gpu, gpus_per_host


class LinkBytes(NamedTuple):
    """Bytes that one GPU sends in a step for one line of traffic."""

    line: Traffic
    nvlink: int
    network: int

    def seconds(self, gpu: Gpu) -> float:
        """Time on the links at their full rate, both at once."""
        return max(self.nvlink / gpu.nvlink, self.network / gpu.network)


def link_bytes(config: TrainConfig) -> list[LinkBytes]:
    """What a step sends, line by line as `step_traffic` gives it."""
    return [_sent(line, config.mesh) for line in step_traffic(config)]


def _sent(line: Traffic, mesh: MeshConfig) -> LinkBytes:
    size, near = _group(line.axes, mesh)
    if line.kind == "ragged-all-to-all":
        return LinkBytes(line, line.payload * (near - 1) // size, line.payload * (size - near) // size)
    if line.kind == "collective-permute":
        return LinkBytes(line, line.payload, 0) if near > 1 else LinkBytes(line, 0, line.payload)
    ring = line.payload * (size - 1) // size
    return LinkBytes(line, ring if near > 1 else 0, ring // near if size > near else 0)


def _group(axes: tuple[str, ...], mesh: MeshConfig) -> tuple[int, int]:
    """GPUs of the collective that GPU 0 takes part in, and how many of them share its host."""
    devices = np.arange(mesh.num_devices).reshape(tuple(mesh_shape(mesh).values()))
    group = devices[tuple(slice(None) if axis in axes else 0 for axis in AXES)].reshape(-1)
    return len(group), int((group < gpus_per_host(mesh.num_devices)).sum())
