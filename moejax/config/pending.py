"""Settings that a config can name and `moejax plan` can count, but that no step carries out yet. A part that is built leaves this file."""

from moejax.config.train import TrainConfig
from moejax.errors import ConfigError

TABLES_ONLY = ("zero_bubble",)
"""Schedules that can be shown and planned; training runs the others."""


def pending(config: TrainConfig) -> dict[str, str]:
    """Each such setting of a config as it is typed, and what a plan counts instead of it."""
    found, mesh = {}, config.mesh
    if mesh.pp > 1 and mesh.schedule_name in TABLES_ONLY:
        setting = f"mesh.virtual_stages={mesh.virtual_stages}" if mesh.schedule == "auto" else f"mesh.schedule={mesh.schedule}"
        found[setting] = f"counted by the table of {mesh.schedule_name}"
    if config.model.precision == "mxfp8":
        found["model.precision=mxfp8"] = (
            "counted as plain bfloat16: rows between GPUs are 33/64 of that in MXFP8, and weights have MXFP8 copies"
        )
    return found


def refuse_pending(config: TrainConfig) -> None:
    """Refuse to run a config that has one.

    Raises:
        ConfigError: with all of them and the way out.
    """
    if found := pending(config):
        raise ConfigError(f"{' and '.join(found)} can be planned (moejax plan) but not run yet; use {' '.join(_ways_out(config))}")


def _ways_out(config: TrainConfig) -> list[str]:
    """The settings that make a config one that runs, of those that it does not have yet."""
    mesh, words = config.mesh, []
    if mesh.pp > 1 and mesh.schedule_name in TABLES_ONLY:
        words += ["--mesh.schedule auto"] * (mesh.schedule != "auto") + ["--mesh.virtual-stages 1"] * (mesh.virtual_stages > 1)
    return words + ["--model.precision plain"] * (config.model.precision == "mxfp8")
