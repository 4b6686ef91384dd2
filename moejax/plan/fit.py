"""Whether a step fits into a GPU, and the settings nearest to a config's own with which it does."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from moejax.config import TrainConfig
from moejax.errors import ConfigError
from moejax.plan.estimate import memory_bytes, usable_bytes
from moejax.plan.gpus import Gpu

MAX_GPUS = 4096

# What a change costs a run, as ranks to sort by: smaller products, work done again, copies over PCIe, weights gathered over and over.
_RECOMPUTE = {"none": 0, "selective": 2, "block": 4, "offload": 5}
_HALF_MICROBATCH, _OTHER_EP, _FSDP = 1, 3, 6


@dataclass(frozen=True)
class Suggestion:
    """Settings with which a config fits. words: as they are typed. changes: name -> value. memory: bytes of one GPU by part."""

    changes: dict[str, str]
    cost: int
    config: TrainConfig
    memory: dict[str, int]

    @property
    def words(self) -> str:
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.changes.items())

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())


def nearest_that_fit(config: TrainConfig, gpu: Gpu, *, scale: float = 1.0, most: int = 3) -> list[Suggestion]:
    """Up to `most` ways to fit, those with the fewest and cheapest changes first; with more GPUs only if no other way is found.

    Args:
        scale: what a compiled step needed over what arithmetic said, applied to all.
    """
    found: list[Suggestion] = []
    for candidate in sorted(_candidates(config), key=lambda s: (len(s.changes), s.cost)):
        if _fits(candidate, gpu, scale) and not any(other.changes.items() <= candidate.changes.items() for other in found):
            found.append(candidate)
    found = found or [candidate for candidate in _larger(config) if _fits(candidate, gpu, scale)]
    return found[:most]


def _fits(candidate: Suggestion, gpu: Gpu, scale: float) -> bool:
    return candidate.total_bytes * scale <= usable_bytes(gpu)


def _candidates(config: TrainConfig) -> Iterator[Suggestion]:
    """Every other setting of recompute, microbatches, ep and weights with the same batch and as many GPUs."""
    sequences = config.microbatch_size // config.mesh.data_ranks
    halvings = [2**i for i in range(sequences.bit_length()) if sequences % 2**i == 0]
    meshes = [(config.mesh.ep, config.mesh.weights)]
    if config.model.moe is not None:
        ranks = math.gcd(config.mesh.data_ranks, config.model.moe.num_experts)
        meshes += [(ep, config.mesh.weights) for ep in range(1, ranks + 1) if ranks % ep == 0 and ep != config.mesh.ep]
    if config.mesh.pp == 1 and config.mesh.weights == "resident":
        meshes += [(ep, "fsdp") for ep, _ in meshes]
    for recompute, half, (ep, weights) in itertools.product(_RECOMPUTE, halvings, meshes):
        changes, cost = {}, 0
        if recompute != config.model.recompute:
            changes["model.recompute"], cost = recompute, _RECOMPUTE[recompute]
        if half > 1:
            changes["microbatches"], cost = config.microbatches * half, cost + _HALF_MICROBATCH * half.bit_length()
        if ep != config.mesh.ep:
            changes |= {"mesh.dp": config.mesh.data_ranks // ep, "mesh.ep": ep}
            cost += _OTHER_EP
        if weights != config.mesh.weights:
            changes["mesh.weights"], cost = weights, cost + _FSDP
        yield from _suggestion(config, changes, cost)


def _larger(config: TrainConfig) -> Iterator[Suggestion]:
    """More replicas of the same step, fewest first: the optimizer's state is split over them."""
    sequences = config.microbatch_size // config.mesh.data_ranks
    replicas = config.mesh.dp
    while 2 * replicas * config.mesh.pp * config.mesh.ep <= MAX_GPUS:
        replicas *= 2
        for recompute, count in itertools.product(dict.fromkeys((config.model.recompute, "block")), dict.fromkeys((sequences, 1))):
            parts = replicas * config.mesh.ep * count
            changes: dict = {"mesh.dp": replicas}
            if config.batch_size % parts:
                changes |= {"batch_size": parts, "microbatches": 1}
            elif config.batch_size // parts != config.microbatches:
                changes["microbatches"] = config.batch_size // parts
            if recompute != config.model.recompute:
                changes["model.recompute"] = recompute
            yield from _suggestion(config, changes, replicas)


def _suggestion(config: TrainConfig, changes: dict, cost: int) -> Iterator[Suggestion]:
    """The config with changes applied, if they are any and make a valid one."""
    if not changes:
        return
    parts: dict[str, dict] = {"": {}, "mesh": {}, "model": {}}
    for name, value in changes.items():
        group, _, last = name.rpartition(".")
        parts[group][last] = value
    if "recompute" in parts["model"]:
        parts["model"]["recompute_keep"] = ()
    try:
        changed = dataclasses.replace(
            config,
            **parts[""],
            mesh=dataclasses.replace(config.mesh, **parts["mesh"]),
            model=dataclasses.replace(config.model, **parts["model"]),
        )
    except ConfigError:
        return
    yield Suggestion({name: str(value) for name, value in changes.items()}, cost, changed, memory_bytes(changed))
