"""Settings that a config can name and `moejax plan` can count, but that no step carries out yet. A part that is built leaves this file."""

from moejax.config.train import TrainConfig
from moejax.errors import ConfigError


def pending(config: TrainConfig) -> dict[str, str]:
    """Each such setting of a config as it is typed, and what a plan counts instead of it."""
    found = {}
    if config.mesh.pp > 1:
        found[f"mesh.pp={config.mesh.pp}"] = "counted by the rules of the design: blocks split over stages, the rest replicated over pp"
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
            "use --mesh.pp 1 --mesh.virtual-stages 1 --model.precision plain, or a smaller reference config"
        )
