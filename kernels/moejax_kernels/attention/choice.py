"""Which implementation runs: decided once, from the device that is being traced for and the problem, never by trial and error."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp

from moejax_kernels.device import device_kind, gpu_generation, platform

Implementation = Literal["xla", "cudnn"]
NAMES = ("auto", *get_args(Implementation))
_MAX_HEAD_DIM = 128  # of every GPU; JAX allows 256 on Hopper, but only where one is present when the program is traced


@dataclass(frozen=True)
class Choice:
    """An implementation, and why it was chosen as one sentence for people."""

    name: Implementation
    reason: str


def choose_implementation(name: str = "auto", *, dtype: Any, head_dim: int) -> Choice:
    """The implementation to use on the device that is being traced for.

    Args:
        name: "auto" takes cudnn where it runs, else xla. Another name never falls back.
        dtype: of queries, keys and values.

    Raises:
        NotImplementedError: if cudnn was asked for by name and does not run there; says why.
        ValueError: if `name` is unknown.
    """
    if name not in NAMES:
        raise ValueError(f"attention={name!r} is not one of {', '.join(NAMES)}")
    if name == "xla":
        return Choice("xla", "xla, because it was asked for by name")
    why_not = _cudnn_refusal(dtype, head_dim)
    if why_not is None:
        return Choice("cudnn", f"cudnn, because it runs on {device_kind()!r} in {jnp.dtype(dtype)} with heads of {head_dim}")
    if name == "cudnn":
        raise NotImplementedError(f"{why_not}; use 'xla' or 'auto'")
    return Choice("xla", f"xla, because {why_not}")


def _cudnn_refusal(dtype: Any, head_dim: int) -> str | None:
    if gpu_generation() is None:
        device = f"a {platform()}" if device_kind() == platform() else repr(device_kind())
        return f"cudnn runs on H100, H200, GH200, B200, GB200, B300 and GB300, and this device is {device}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"cudnn takes bfloat16, not {jnp.dtype(dtype)}"
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"cudnn takes heads of a multiple of 8 up to {_MAX_HEAD_DIM}, not of {head_dim}"
    return None
