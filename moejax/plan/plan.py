"""A plan: the arithmetic for a config on GPUs, XLA's figures where it was compiled, and whether it fits."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from moejax.config import SYSTEM_REFERENCE, TrainConfig, pending, to_dict
from moejax.plan.compiled import Compiled, as_planned, compile_plan
from moejax.plan.estimate import ARGUMENTS, ERROR, LEFT_OUT, Estimate, check_count, estimate, scaled, usable_bytes
from moejax.plan.fit import Suggestion, nearest_that_fit


@dataclass(frozen=True)
class Plan:
    """compiled: None if it was not asked for, or a part of the config cannot run yet. suggestions: empty if the step fits."""

    estimate: Estimate
    compiled: Compiled | None
    suggestions: list[Suggestion]

    @property
    def config(self) -> TrainConfig:
        return self.estimate.config

    @property
    def total_bytes(self) -> int:
        """What a GPU needs: by XLA where it was compiled."""
        return self.compiled.total_bytes if self.compiled else self.estimate.total_bytes

    @property
    def scale(self) -> float:
        """What XLA holds beside the arguments over what arithmetic says; 1 if nothing was compiled."""
        own = sum(size for name, size in self.estimate.memory.items() if name not in ARGUMENTS)
        return (self.compiled.total_bytes - self.compiled.argument_bytes) / own if self.compiled else 1.0

    @property
    def margin_bytes(self) -> int:
        """What stays free of the part of memory that may be filled; negative if the step does not fit."""
        return usable_bytes(self.estimate.gpu) - self.total_bytes

    @property
    def is_narrow(self) -> bool:
        """Whether a step that fits by arithmetic would not if that were as far off as it can be."""
        return self.compiled is None and sum(scaled(self.estimate.memory, 1 + ERROR).values()) > usable_bytes(self.estimate.gpu)

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0


def can_compile(config: TrainConfig) -> bool:
    """Whether there is a step to compile: MXFP8 is compiled as bfloat16, other parts that cannot run yet are only counted."""
    return not pending(as_planned(config))


def plan_step(config: TrainConfig, gpu: str, *, num_gpus: int | None = None, compile: bool = False) -> Plan:
    """Plan a config for its mesh of these GPUs.

    Args:
        gpu: a name in `moejax.plan.gpus.GPUS`.
        num_gpus: how many there are; None takes what the mesh needs.
        compile: compile the step too, if it `can_compile`. Needs JAX's CUDA plugin, no GPU, and one to five minutes of two cores.

    Raises:
        ConfigError: for an unknown GPU, a number of GPUs that is not the mesh's, a setting that the GPU cannot take, or a missing plugin.
    """
    if num_gpus is not None:
        check_count(config, num_gpus)
    figures = estimate(config, gpu)
    compiled = compile_plan(config, gpu) if compile and can_compile(config) else None
    plan = Plan(figures, compiled, [])
    if plan.fits:
        return plan
    return Plan(figures, compiled, nearest_that_fit(config, figures.gpu, scale=plan.scale))


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON holds it; bytes and seconds, of one GPU and one step."""
    figures = plan.estimate
    return {
        "config": to_dict(plan.config),
        "gpu": figures.gpu.name,
        "num_gpus": plan.config.mesh.num_devices,
        "memory_bytes": figures.gpu.memory_bytes,
        "usable_bytes": usable_bytes(figures.gpu),
        "left_out": LEFT_OUT,
        "parameters": figures.parameters,
        "active_parameters": figures.active_parameters,
        "flops_per_token": figures.flops_per_token,
        "tokens": figures.tokens,
        "memory": figures.memory,
        "total_bytes": plan.total_bytes,
        "arithmetic_total_bytes": figures.total_bytes,
        "host_bytes": figures.host_bytes,
        "dispatch_bytes": figures.dispatch_bytes,
        "traffic": [
            line.line._asdict() | {"nvlink": line.nvlink, "network": line.network, "gpus_on_network": line.crossing}
            for line in figures.links
        ],
        "compute_s": figures.compute_s,
        "send_s": figures.send_s,
        "bubble": figures.bubble,
        "choices": figures.choices,
        "pending": figures.pending,
        "system_reference": SYSTEM_REFERENCE if plan.config.model.is_system_reference else None,
        "compiled": None if plan.compiled is None else _compiled_dict(plan.compiled),
        "fits": plan.fits,
        "margin_bytes": plan.margin_bytes,
        "suggestions": [_suggestion_dict(plan, suggestion) for suggestion in plan.suggestions],
    }


def _suggestion_dict(plan: Plan, suggestion: Suggestion) -> dict[str, Any]:
    return {
        "changes": suggestion.changes,
        "words": suggestion.words,
        "num_gpus": suggestion.config.mesh.num_devices,
        "memory": suggestion.memory,
        "total_bytes": suggestion.total_bytes,
        "margin_bytes": usable_bytes(plan.estimate.gpu) - suggestion.total_bytes,
    }


def _compiled_dict(compiled: Compiled) -> dict[str, Any]:
    return dataclasses.asdict(compiled) | {
        "total_bytes": compiled.total_bytes,
        "packing_bytes": compiled.packing_bytes,
        "buffers": [dict(zip(("bytes", "array", "part", "source"), buffer, strict=True)) for buffer in compiled.buffers],
        "traffic": [line._asdict() for line in compiled.traffic],
    }
