"""What a MoE layer runs with, chosen for the device that is being traced for and never by trial and error."""

from typing import Literal

from moejax.errors import ConfigError
from moejax_kernels.device import platform
from moejax_kernels.grouped_matmul import Choice, choose_implementation

Transport = Literal["gather", "ragged"]


def choose_transport(name: Literal["auto", "gather", "ragged"]) -> Transport:
    """The transport behind model.moe.transport; "auto" takes ragged, or gather on CPU.

    Raises:
        ConfigError: for ragged on CPU, where XLA has no ragged all-to-all.
    """
    if name == "auto":
        return "gather" if platform() == "cpu" else "ragged"
    if name == "ragged" and platform() == "cpu":
        raise ConfigError("model.moe.transport=ragged needs GPUs: XLA has no ragged all-to-all on CPU; use gather or auto")
    return name


def choose_kernel(name: str, *, dtype: str, embed_dim: int, expert_dim: int) -> Choice:
    """The implementation of the grouped matmul behind model.moe.grouped_matmul, and why.

    Raises:
        ConfigError: if it does not run on this device or with these sizes, or nothing but the slow definition does.
    """
    try:
        return choose_implementation(name, dtype=dtype, widths=(embed_dim, expert_dim))
    except NotImplementedError as error:
        settings = f"model.dtype={dtype}, model.embed_dim={embed_dim} and model.moe.expert_dim={expert_dim}"
        raise ConfigError(f"model.moe.grouped_matmul={name} with {settings}: {error}") from error
