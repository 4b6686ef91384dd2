"""Tolerances by dtype, and comparison of trees by name with failures that can be read. Needs NumPy only."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Largest error accepted against a float64 truth.

    scalar: of a loss, relative to the truth.
    leaf: of one array, largest deviation over the array's largest magnitude.
    floor: magnitude, as a share of the largest in the whole tree, below which an array is not asked to be accurate in itself;
        a gradient that is zero in theory is the sum of rounding errors of that size.
    """

    scalar: float
    leaf: float
    floor: float


TOLERANCES = {
    "float64": Tolerance(scalar=1e-12, leaf=1e-10, floor=1e-12),
    "float32": Tolerance(scalar=2e-6, leaf=2e-5, floor=1e-3),
    "bfloat16": Tolerance(scalar=2e-3, leaf=8e-2, floor=1e-2),
}
"""By compute dtype. A parallel path sums in another order than one device and is held to the same numbers."""


def named_leaves(tree: Mapping, prefix: str = "") -> dict[str, np.ndarray]:
    """Dotted name -> NumPy array, for a nested dict of arrays."""
    flat: dict[str, np.ndarray] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= named_leaves(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = np.asarray(value)
    return flat


def assert_scalar_close(actual: float, expected: float, dtype: str, what: str) -> None:
    """Compare one number; what names it in the failure."""
    limit = TOLERANCES[dtype].scalar
    error = abs(float(actual) - float(expected)) / max(abs(float(expected)), 1e-6)
    assert error <= limit, (
        f"{what}: got {float(actual):.9g}, expected {float(expected):.9g}; relative error {error:.2e} > {limit:.0e} for {dtype}"
    )


def assert_trees_close(actual: Mapping, expected: Mapping, dtype: str, what: str) -> None:
    """Compare two nested dicts of arrays leaf by leaf, by name; a failure lists the worst leaves, worst first."""
    ours, truth = named_leaves(actual), named_leaves(expected)
    assert set(ours) == set(truth), (
        f"{what}: names differ: only in actual {sorted(set(ours) - set(truth))}, only in expected {sorted(set(truth) - set(ours))}"
    )
    shapes = [f"{n}: got {ours[n].shape}, expected {truth[n].shape}" for n in truth if ours[n].shape != truth[n].shape]
    assert not shapes, f"{what}: shapes differ: {'; '.join(shapes)}"
    tolerance = TOLERANCES[dtype]
    largest = max((_magnitude(value) for value in truth.values()), default=0.0)
    errors = []
    for name, value in truth.items():
        scale = max(_magnitude(value), tolerance.floor * largest, 1e-30)
        deviation = np.abs(ours[name].astype(np.float64) - value.astype(np.float64))
        error = float(np.max(deviation, initial=0.0)) / scale
        if not error <= tolerance.leaf:  # also true for NaN
            at = np.unravel_index(int(np.argmax(np.where(np.isnan(deviation), np.inf, deviation))), value.shape)
            at = tuple(int(i) for i in at)
            errors.append((error, f"  {error:.2e}  {name}{list(at)}: got {ours[name][at]:.9g}, expected {value[at]:.9g}"))
    errors.sort(key=lambda item: -np.inf if np.isnan(item[0]) else -item[0])
    lines = "\n".join(line for _, line in errors[:8])
    assert not errors, (
        f"{what}: {len(errors)} of {len(truth)} arrays are further off than {tolerance.leaf:.0e} for {dtype}; worst:\n{lines}"
    )


def _magnitude(value: np.ndarray) -> float:
    return float(np.max(np.abs(value.astype(np.float64)), initial=0.0))
