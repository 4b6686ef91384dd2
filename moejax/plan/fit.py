"""Whether a step fits into a GPU, and the settings nearest to a config's own with which it does."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moejax.config import MeshConfig, TrainConfig, pending
from moejax.errors import ConfigError
from moejax.plan.estimate import ERROR, memory_bytes, scaled, step_seconds, usable_bytes
from moejax.plan.gpus import Gpu
from moejax.plan.moves import tokens

MAX_GPUS = 4096

Recompute = Literal["none", "selective", "block", "offload"]
_PER_CHANGE, _PER_HALVING, _PER_BATCH, _FSDP = 1.15, 1.02, 2.0, 1.5
"""What a step is taken to cost more for each setting that changes, for products of half as many rows, for learning from another batch, and
for gathers of weights in every layer, which wait for each other."""


@dataclass(frozen=True)
class Suggestion:
    """Settings with which a config fits.

    changes: name -> value. memory: bytes of one GPU by part, scaled as XLA's figures ask.
    """

    changes: dict[str, str]
    config: TrainConfig
    memory: dict[str, int]

    @property
    def words(self) -> str:
        """The settings as they are typed."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.changes.items())

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())


def nearest_that_fit(config: TrainConfig, gpu: Gpu, *, scale: float = 1.0, most: int = 3) -> list[Suggestion]:
    """Up to `most` ways to fit, no two with the same mesh, those with the least time of a step and the fewest changes first.

    They have as many GPUs as the config, or if there are none the fewest that will do; beside those stand ways with more GPUs that change
    fewer settings, and shorter sequences on as many GPUs as the config has. All leave as much free as arithmetic may be wrong by.

    Args:
        scale: what the compiled step needed beside its arguments over what arithmetic said, applied to all.
    """
    search, count = _Search(config, gpu, scale), config.mesh.num_devices
    if found := _best(search.with_gpus(count), search.price):
        return found[:most]
    others = _best(search.shorter(), search.price)[:1]
    least = MAX_GPUS  # changes of the simplest way so far
    for larger in _larger(count, gpu):
        if not (new := _best(search.with_gpus(larger), search.price)):
            continue
        simplest = min(new, key=lambda s: len(s.changes))
        if not found:
            found = new
        elif len(simplest.changes) < least:
            others.append(simplest)
        least = min(least, len(simplest.changes))
        if least == 1:
            break
    return [*found[: max(1, most - len(others))], *others][:most]


def _larger(count: int, gpu: Gpu) -> list[int]:
    """Numbers of GPUs above `count`: whole hosts, twice as many each time."""
    return [count * 2**power for power in range(1, (MAX_GPUS // count).bit_length()) if count * 2**power >= gpu.host]


def _best(candidates: Iterable[Suggestion], price: Callable[[Suggestion], float]) -> list[Suggestion]:
    """The cheapest of each mesh, cheapest first, without those that change more than another one and all of that."""
    known, found = list(candidates), {}
    needed = [s for s in known if not any(other.changes.items() < s.changes.items() for other in known)]
    for candidate in sorted(needed, key=price):
        found.setdefault(candidate.config.mesh, candidate)
    return list(found.values())


@dataclass(frozen=True)
class _Search:
    config: TrainConfig
    gpu: Gpu
    scale: float

    def with_gpus(self, count: int) -> Iterator[Suggestion]:
        """For every mesh of that many GPUs and mode of recompute, the largest microbatch that fits, and that of as many microbatches."""
        for mesh in _meshes(self.config, count):
            batch = -(-self.config.batch_size // mesh.data_ranks) * mesh.data_ranks
            sizes = _sequences(self.config, batch // mesh.data_ranks)
            if not any(self._try(mesh, batch, sizes[-1], recompute) for recompute in ("block", "offload")):
                continue  # nothing needs less than that
            for recompute in get_args(Recompute):
                fits = (found for size in sizes if (found := self._try(mesh, batch, size, recompute)))
                yield from itertools.islice(fits, 1)
                for size in sizes:
                    if size * self.config.microbatches * mesh.data_ranks == batch and (found := self._try(mesh, batch, size, recompute)):
                        yield found

    def shorter(self) -> Iterator[Suggestion]:
        """Half as long sequences, and half of that, until they fit."""
        length = self.config.data.seq_len
        while length % 2 == 0 and length > 128:
            length //= 2
            modes: list[Recompute] = [self.config.model.recompute, "block"]
            for recompute in dict.fromkeys(modes):
                changed = _replaced(self.config, recompute, data=dataclasses.replace(self.config.data, seq_len=length))
                if changed and (found := self._fitting(changed)):
                    yield found
                    return

    def _try(self, mesh: MeshConfig, batch: int, size: int, recompute: Recompute) -> Suggestion | None:
        """The config with another mesh, batch, recompute and sequences of a GPU and microbatch, if it is one, is another, and fits."""
        microbatches = batch // mesh.data_ranks // size
        changed = _replaced(self.config, recompute, mesh=mesh, batch_size=batch, microbatches=microbatches)
        if changed is None or changed == self.config or len(pending(changed)) > len(pending(self.config)):
            return None
        return self._fitting(changed)

    def _fitting(self, changed: TrainConfig) -> Suggestion | None:
        memory = scaled(memory_bytes(changed), self.scale)
        if sum(scaled(memory, 1 + ERROR).values()) > usable_bytes(self.gpu):
            return None
        return Suggestion(_changes(self.config, changed), changed, memory)

    def price(self, suggestion: Suggestion) -> float:
        """Seconds of a step for each token, and more for what changes."""
        config, changes = suggestion.config, suggestion.changes
        halvings = max(0.0, math.log2(tokens(self.config) / tokens(config)))
        other_batch = _PER_BATCH if "batch_size" in changes else 1
        of_token = step_seconds(config, self.gpu) / (config.batch_size * config.data.seq_len)
        gathers = _FSDP if "mesh.weights" in changes else 1
        return of_token * _PER_CHANGE ** len(changes) * _PER_HALVING**halvings * other_batch * gathers


def _changes(old: TrainConfig, new: TrainConfig) -> dict[str, str]:
    """Settings of `new` that `old` has another value of."""
    names = ("model.recompute", "microbatches", "mesh.pp", "mesh.dp", "mesh.ep", "mesh.weights", "batch_size", "data.seq_len")

    def value(config: TrainConfig, name: str) -> object:
        return functools.reduce(getattr, name.split("."), config)

    return {name: str(value(new, name)) for name in names if value(new, name) != value(old, name)}


def _meshes(config: TrainConfig, count: int) -> Iterator[MeshConfig]:
    """Meshes of that many GPUs that can train the model, those with fsdp after all others."""
    old, model = config.mesh, config.model
    experts = 1 if model.moe is None else model.moe.num_experts
    stages = [pp for pp in range(1, model.num_moe_layers // old.virtual_stages + 1) if count % pp == 0] if old.pp > 1 else [1]
    for pp in stages:
        if pp == 1 < old.pp and (old.virtual_stages > 1 or old.schedule != "auto"):
            continue
        for ep in range(1, min(count // pp, experts) + 1):
            if (count // pp) % ep == 0 and experts % ep == 0:
                mesh = dataclasses.replace(old, pp=pp, dp=count // pp // ep, ep=ep)
                yield from (mesh, dataclasses.replace(mesh, weights="fsdp")) if pp == 1 and old.weights == "resident" else (mesh,)


def _sequences(config: TrainConfig, of_step: int) -> list[int]:
    """Sequences of a GPU and microbatch: no more than now, largest first."""
    most = config.microbatch_size // config.mesh.data_ranks
    return [size for size in range(min(most, of_step), 0, -1) if of_step % size == 0]


def _replaced(config: TrainConfig, recompute: Recompute, **fields: Any) -> TrainConfig | None:
    """The config with other fields; None if there is none such."""
    try:
        changed = dataclasses.replace(config, **fields)
        if recompute == config.model.recompute:
            return changed
        return dataclasses.replace(changed, model=dataclasses.replace(config.model, recompute=recompute, recompute_keep=()))
    except ConfigError:
        return None
