"""The ways in which a config could be run on up to eight devices: mesh, schedule, transport, kernel, recompute, microbatches, weights."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

from moejax.config import MeshConfig, TrainConfig
from moejax.config.pending import TABLES_ONLY
from moejax.errors import ConfigError
from moejax.parallel.expert.transports import TRANSPORTS
from moejax.parallel.pipeline import SCHEDULES, check_schedule
from moejax.verify.cover import cover_pairs

DEVICES = 8
_RANKS = (1, 2, 4, 8)
_STAGES = (1, 2)  # of a rank
_MICROBATCHES = (1, 2, 4)
_WEIGHTS, _RECOMPUTE = ("resident", "fsdp"), ("none", "block", "selective", "offload")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run a config. The fields are settings by their last name; mesh.schedule of one rank is auto."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    schedule: str = "auto"
    virtual_stages: int = 1
    weights: Literal["resident", "fsdp"] = "resident"
    microbatches: int = 1
    recompute: Literal["none", "block", "selective", "offload"] = "none"
    transport: Literal["auto", "ragged", "gather", "dense", "ring"] = "auto"
    grouped_matmul: Literal["auto", "reference", "cpu", "mosaic"] = "auto"

    def config(self, small: TrainConfig, keep: tuple[str, ...] = ()) -> TrainConfig:
        """A shrunken config run in this way. keep: its model.recompute_keep, for the mode of recompute that it is set for.

        Raises:
            ConfigError: if it cannot be.
        """
        model = small.model
        moe = model.moe and dataclasses.replace(model.moe, transport=self.transport, grouped_matmul=self.grouped_matmul)
        model = dataclasses.replace(model, moe=moe, recompute=self.recompute, recompute_keep=keep)
        mesh = MeshConfig(
            pp=self.pp, dp=self.dp, ep=self.ep, schedule=self.schedule, virtual_stages=self.virtual_stages, weights=self.weights
        )
        return dataclasses.replace(small, model=model, mesh=mesh, microbatches=self.microbatches)

    @property
    def words(self) -> str:
        """The settings as they are typed, those that are not the simplest."""
        changed = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default}
        return " ".join(f"--{setting} {getattr(self, name)}" for name, setting in SETTINGS.items() if name in changed) or "one device"

    @property
    def values(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


SETTINGS = {
    **{name: f"mesh.{name}" for name in ("pp", "dp", "ep", "schedule", "virtual_stages", "weights")},
    "microbatches": "microbatches",
    "recompute": "model.recompute",
    "transport": "model.moe.transport",
    "grouped_matmul": "model.moe.grouped_matmul",
}
"""Field of a case -> setting."""


def all_cases(small: TrainConfig, devices: int = DEVICES) -> list[Case]:
    """Every way, the simplest first."""
    has_experts = small.model.moe is not None
    transports = [name for name, transport in TRANSPORTS.items() if transport.refusal("cpu", DEVICES) is None] if has_experts else ["auto"]
    kernels = ["cpu", "reference"] if has_experts else ["auto"]
    found = []
    for pp, dp, ep, m in product(_RANKS, _RANKS, _RANKS, _MICROBATCHES):
        if math.prod((pp, dp, ep)) > devices:
            continue
        for (schedule, stages), weights, recompute in product(_pipelines(pp), _WEIGHTS, _RECOMPUTE):
            how: dict[str, Any] = {"pp": pp, "dp": dp, "ep": ep, "schedule": schedule, "virtual_stages": stages}
            how |= {"weights": weights, "microbatches": m, "recompute": recompute}
            if _is_accepted(Case(**how), small):
                ways = product(transports if ep > 1 else ["auto"], kernels)
                found += [Case(**how | {"transport": transport, "grouped_matmul": kernel}) for transport, kernel in ways]
    return found


def covering_cases(cases: list[Case]) -> list[Case]:
    """Few of them that hold every pair of settings that any of them holds."""
    return [cases[i] for i in cover_pairs([tuple(_columns(case)) for case in cases])]


def _columns(case: Case) -> list[Any]:
    values = case.values
    return [(values.pop("schedule"), values.pop("virtual_stages")), *values.values()]


@cache
def _pipelines(pp: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("auto", 1)]
    return [(name, stages) for name, stages in product(SCHEDULES, _STAGES) if name not in TABLES_ONLY]


def _is_accepted(case: Case, small: TrainConfig) -> bool:
    try:
        check_schedule(case.config(small))
    except ConfigError:
        return False
    return True
