"""Routings that break stacks: skewed, padded, all on two experts."""

import numpy as np


def routing(kind: str, ep: int, seed: int, *, tokens: int, top_k: int, num_experts: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts int32 [ep, tokens, top_k], distinct within a token, and which tokens are real, bool [ep, tokens]."""
    rng = np.random.default_rng(seed)
    if kind == "one":
        experts = np.tile(np.array([5, 4, 6, 7])[:top_k], (ep, tokens, 1))
    elif kind == "skewed":
        likelihood = 1.0 / np.arange(1, num_experts + 1) ** 1.2
        likelihood /= likelihood.sum()
        experts = np.stack([rng.choice(num_experts, top_k, replace=False, p=likelihood) for _ in range(ep * tokens)])
    else:
        experts = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(ep * tokens)])
    real = rng.random((ep, tokens)) < (0.7 if kind == "padded" else 2)
    return experts.reshape(ep, tokens, top_k).astype(np.int32), real
