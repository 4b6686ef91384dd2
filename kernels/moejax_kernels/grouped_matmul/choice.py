"""Which implementation runs: decided once, from the device that is being traced for and the problem, never by trial and error."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from moejax_kernels.device import device_kind, gpu_generation, platform
from moejax_kernels.grouped_matmul.shapes import refusal

Implementation = Literal["reference", "cpu", "mosaic"]
NAMES = ("auto", *get_args(Implementation))


@dataclass(frozen=True)
class Choice:
    """An implementation, and why it was chosen as one sentence for people."""

    name: Implementation
    reason: str


def choose_implementation(name: str = "auto", *, dtype: Any, widths: Sequence[int], tile: int = 128) -> Choice:
    """The implementation to use on the device that is being traced for.

    Args:
        name: "auto" takes cpu on a CPU and mosaic on the GPUs that it is written for. Another name never falls back.
        dtype: of rows and weights.
        widths: K and N of the products.
        tile: rows of a tile.

    Raises:
        NotImplementedError: if `name` does not run there, or "auto" finds nothing that does; says what does.
        ValueError: if `name` is unknown.
    """
    if name not in NAMES:
        raise ValueError(f"grouped_matmul={name!r} is not one of {', '.join(NAMES)}")
    kind = device_kind()
    if name == "auto" and platform() == "cpu":
        return Choice("cpu", f"cpu, because the device is {kind!r}")
    if name == "cpu" and platform() != "cpu":
        raise NotImplementedError(f"cpu runs on CPUs, and this device is {kind!r}; use 'auto' or 'reference'")
    if name in ("auto", "mosaic"):
        why_not = _mosaic_refusal(dtype, widths, tile)
        if why_not is not None:
            raise NotImplementedError(why_not)
        return Choice("mosaic", f"mosaic, because {kind!r} has its instructions and widths {_words(widths)} in {dtype} fit its tiles")
    return Choice(cast(Implementation, name), f"{name}, because it was asked for by name")


def choose_tile() -> int:
    """Tile for the device being traced for: 128 on accelerators, and 1 on CPU, whose body gathers rows anyway and needs no pad rows."""
    return 1 if platform() == "cpu" else 128


def _mosaic_refusal(dtype: Any, widths: Sequence[int], tile: int) -> str | None:
    if gpu_generation() is None:
        others = "'cpu' or 'reference'" if platform() == "cpu" else "'reference', which is slow"
        return f"mosaic runs on H100, H200, GH200, B200, GB200, B300 and GB300, and this device is {device_kind()!r}; use {others}"
    why_not = refusal(dtype, widths, tile)
    return why_not and f"mosaic, the kernels for {device_kind()!r}, {why_not}"


def _words(widths: Sequence[int]) -> str:
    return " and ".join(str(width) for width in widths)
