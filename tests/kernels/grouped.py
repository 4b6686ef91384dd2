"""Grouped products in NumPy: rows laid out one expert after the other, and what must come out, in float64."""

import jax.numpy as jnp
import numpy as np


def rows_of(sizes, tile):
    """The rows of each expert in the tile-aligned layout, worked out one after the other."""
    start, rows = 0, []
    for size in sizes:
        rows.append(slice(start, start + size))
        start += -(-size // tile) * tile
    return rows


def case(sizes, buffer, width, tile, dtype="float32", seed=0):
    """x and dy with zero pad rows, and w."""
    rng = np.random.default_rng(seed)
    x, dy = np.zeros((buffer, width[0])), np.zeros((buffer, width[1]))
    for rows in rows_of(sizes, tile):
        x[rows], dy[rows] = rng.normal(size=x[rows].shape), rng.normal(size=dy[rows].shape)
    w = rng.normal(size=(len(sizes), *width))
    return tuple(jnp.asarray(a, dtype) for a in (x, w, dy))


def exact(x, w, dy, sizes, tile):
    """The product and its gradients in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    truth = {"y": np.zeros_like(dy), "dx": np.zeros_like(x), "dw": np.zeros_like(w)}
    for e, rows in enumerate(rows_of(sizes, tile)):
        truth["y"][rows] = x[rows] @ w[e]
        truth["dx"][rows] = dy[rows] @ w[e].T
        truth["dw"][e] = x[rows].T @ dy[rows]
    return truth
