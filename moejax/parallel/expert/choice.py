"""What a MoE layer runs with, chosen for the device that is being traced for and never by trial and error."""

import warnings

from moejax.errors import ConfigError
from moejax.parallel.expert.transports import LOCAL, TRANSPORTS, Transport
from moejax_kernels.device import platform
from moejax_kernels.grouped_matmul import Choice, choose_implementation


def choose_transport(name: str, ranks: int) -> Transport:
    """The transport behind model.moe.transport over that many ranks; "auto" takes ragged, or gather on CPU. One rank needs none.

    Warns of faults that are known to show at that size.

    Raises:
        ConfigError: if the named transport does not run on this device or mesh.
    """
    device = platform()
    chosen = TRANSPORTS[("gather" if device == "cpu" else "ragged") if name == "auto" else name]
    if (reason := chosen.refusal(device, ranks)) is not None:
        raise ConfigError(f"model.moe.transport={name} {reason}")
    if (fault := chosen.warning(device, ranks)) is not None:
        warnings.warn(f"model.moe.transport={name} with mesh.ep={ranks} {fault}", stacklevel=2)
    return LOCAL if ranks == 1 else chosen


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
