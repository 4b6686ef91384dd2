"""Settings that a config can name and `moejax plan` can count, but that no step carries out yet. A part that is built leaves this file."""

from moejax.config.train import TrainConfig
from moejax.errors import ConfigError


def pending(config: TrainConfig) -> dict[str, str]:
    """Each such setting of a config as it is typed, and what a plan counts instead of it."""
    found = {}
    if config.mesh.virtual_stages > 1:
        found[f"mesh.virtual_stages={config.mesh.virtual_stages}"] = "counted by the rules of the design: blocks split over stages"
    if config.mesh.pp > 1 and config.model.num_moe_layers % config.mesh.pp:
        found[f"mesh.pp={config.mesh.pp} for {config.model.num_moe_layers} MoE blocks"] = "counted as stages filled up with empty blocks"
    if config.mesh.pp > 1 and config.mesh.schedule in ("v_shaped", "zero_bubble"):
        found[f"mesh.schedule={config.mesh.schedule}"] = "counted as 1f1b"
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
        raise ConfigError(
            f"{' and '.join(found)} can be planned (moejax plan) but not run yet; "
            "use --mesh.virtual-stages 1 with a mesh.pp that divides the MoE blocks, and --model.precision plain"
        )
