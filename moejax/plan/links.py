"""Which links the collectives of a step use: NVLink inside a domain, or the network between domains; bytes that the busiest GPU sends.

A collective over a group with h of its n GPUs in a GPU's own domain, carrying S bytes:

    reduce-scatter, all-gather    a ring: S (n-1)/n over NVLink if h > 1; over the network 1/h of that, for the h GPUs share what crosses
    all-reduce                    both of them, one after the other
    (ragged) all-to-all           each row straight to its expert, all equally likely: S (h-1)/n over NVLink, S (n-h)/n over the network
    collective-permute            S to the next stage, on NVLink if that is in the same domain

Where GPUs differ, because groups lie in domains unevenly, each link counts for the GPU that sends most over it.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from moejax.config import MeshConfig, TrainConfig
from moejax.parallel.mesh import AXES, mesh_shape
from moejax.plan.gpus import Gpu
from moejax.plan.payloads import Traffic, step_traffic


class LinkBytes(NamedTuple):
    """Bytes that the busiest GPU sends over each link in a step, for one line of traffic.

    crossing: GPUs that send anything over the network.
    """

    line: Traffic
    nvlink: int
    network: int
    crossing: int

    def seconds(self, gpu: Gpu) -> float:
        """Time on the links at their full rate, both at once."""
        return max(self.nvlink / gpu.nvlink, self.network / gpu.network)


def link_bytes(config: TrainConfig, gpu: Gpu) -> list[LinkBytes]:
    """What a step sends, line by line as `step_traffic` gives it."""
    return [_sent(line, config.mesh, gpu.domain) for line in step_traffic(config)]


def _sent(line: Traffic, mesh: MeshConfig, domain: int) -> LinkBytes:
    places = _groups(line.axes, mesh) // domain
    size, payload = places.shape[1], line.payload
    if line.kind == "collective-permute":
        crosses = places != np.roll(places, -1, axis=1)
        return LinkBytes(line, 0 if crosses.all() else payload, payload if crosses.any() else 0, int(crosses.sum()))
    near = _near(places)
    if line.kind in ("ragged-all-to-all", "all-to-all"):
        nvlink, network = payload * (near - 1) // size, payload * (size - near) // size
    else:
        ring = payload * (size - 1) // size * (2 if line.kind == "all-reduce" else 1)
        nvlink, network = np.where(near > 1, ring, 0), np.where(near < size, ring // near, 0)
    return LinkBytes(line, int(nvlink.max()), int(network.max()), int((network > 0).sum()))


def _groups(axes: tuple[str, ...], mesh: MeshConfig) -> Int[np.ndarray, "groups GPUs"]:
    """GPUs of every group of a collective, counted as hosts have them."""
    devices = np.arange(mesh.num_devices).reshape(tuple(mesh_shape(mesh).values()))
    inside = [place for place, axis in enumerate(AXES) if axis in axes]
    size = int(np.prod([devices.shape[place] for place in inside]))
    return np.moveaxis(devices, inside, range(-len(inside), 0)).reshape(-1, size)


def _near(places: Int[np.ndarray, "groups GPUs"]) -> Int[np.ndarray, "groups GPUs"]:
    """For each GPU how many of its group lie in its domain."""
    key = np.arange(len(places))[:, None] * (places.max() + 1) + places
    return np.bincount(key.reshape(-1))[key]
