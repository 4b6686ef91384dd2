"""The capacity rule: which routes a rank accepts when more arrive than it has rows for."""

import math
from fractions import Fraction

import numpy as np


def kept_routes(experts: np.ndarray, real: np.ndarray, *, num_experts: int, capacity_factor: float | None) -> np.ndarray:
    """Kept routes, bool [ep, tokens, k], of one microbatch on one group of ep ranks.

    experts [ep, tokens, k] are the chosen experts, real [ep, tokens] is False for padding. Every rank owns num_experts / ep
    consecutive experts and fills its rows expert by expert, source rank by source rank, token by token, slot by slot.
    """
    ep, tokens, k = experts.shape
    kept = np.zeros(experts.shape, bool)
    for owner in range(ep):
        room = math.inf if capacity_factor is None else capacity(capacity_factor, tokens, k)
        for expert in range(owner * num_experts // ep, (owner + 1) * num_experts // ep):
            for source in range(ep):
                for token in range(tokens):
                    for slot in range(k):
                        if real[source, token] and experts[source, token, slot] == expert and room > 0:
                            kept[source, token, slot] = True
                            room -= 1
    return kept


def capacity(capacity_factor: float, tokens: int, k: int) -> int:
    """Rows that a rank accepts; the factor is the decimal that was typed."""
    return max(1, math.ceil(Fraction(str(capacity_factor)) * tokens * k))


def demand(experts: np.ndarray, real: np.ndarray, *, num_experts: int, capacity_factor: float) -> float:
    """Rows that the most wanted rank would get without a capacity, over its capacity."""
    ep, tokens, k = experts.shape
    owner = experts[real] // (num_experts // ep)
    return float(np.bincount(owner.reshape(-1), minlength=ep).max() / capacity(capacity_factor, tokens, k))
