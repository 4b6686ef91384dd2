"""Clipping, AdamW, parameter groups, the skip rule and the schedule in NumPy float64."""

import fnmatch
import math

import numpy as np

from moejax.config import OptimConfig


def learning_rate(optim: OptimConfig, steps: int, step: int) -> float:
    """Learning rate of a step counted from 0."""
    schedule, done = optim.schedule, step + 1
    if done <= schedule.warmup_steps:
        return optim.lr * done / schedule.warmup_steps
    if schedule.kind == "constant":
        return optim.lr
    length = steps - schedule.warmup_steps if schedule.kind == "cosine" else schedule.decay_steps
    progress = max(0.0, min(1.0, (done - (steps - length)) / length))
    fall = (1 - math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else progress
    return optim.lr * (1 - (1 - schedule.final_fraction) * fall)


class Optimizer:
    """Float64 masters and moments, by dotted name."""

    def __init__(self, optim: OptimConfig, steps: int, master: dict[str, np.ndarray]):
        self.optim, self.steps = optim, steps
        self.master = {name: np.asarray(value, np.float64) for name, value in master.items()}
        self.mu = {name: np.zeros_like(value) for name, value in self.master.items()}
        self.nu = {name: np.zeros_like(value) for name, value in self.master.items()}
        self.history: list[tuple[float, float]] = []
        self.step = self.updates = 0

    def apply(self, gradients: dict[str, np.ndarray], loss: float) -> bool:
        """One step; returns whether the parameters were updated."""
        norm = math.sqrt(sum(float(np.sum(np.asarray(g, np.float64) ** 2)) for g in gradients.values()))
        finite = math.isfinite(loss) and math.isfinite(norm)
        applied = finite and not self._is_outlier(loss, norm)
        if finite:
            self.history.append((loss, norm))
        if applied:
            self.updates += 1
            self._update(gradients, norm)
        self.step += 1
        return applied

    def _is_outlier(self, loss: float, norm: float) -> bool:
        window = self.optim.skip_window
        earlier = np.array(self.history[-window:])
        if self.optim.skip_sigma is None or len(earlier) < window // 2:
            return False
        limit = earlier.mean(axis=0) + self.optim.skip_sigma * earlier.std(axis=0, ddof=1)
        return bool(loss > limit[0] or norm > limit[1])

    def _update(self, gradients: dict[str, np.ndarray], norm: float) -> None:
        optim, t = self.optim, self.updates
        clip = 1.0 if optim.max_grad_norm is None else min(1.0, optim.max_grad_norm / (norm + 1e-6))
        for name, master in self.master.items():
            lr, decay = learning_rate(optim, self.steps, self.step), optim.weight_decay
            if ".experts." in name:
                lr *= optim.expert_lr_scale
                decay = optim.weight_decay if optim.expert_weight_decay is None else optim.expert_weight_decay
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in optim.no_decay):
                decay = 0.0
            g = np.asarray(gradients[name], np.float64) * clip
            mu = self.mu[name] = optim.b1 * self.mu[name] + (1 - optim.b1) * g
            nu = self.nu[name] = optim.b2 * self.nu[name] + (1 - optim.b2) * g**2
            step = (mu / (1 - optim.b1**t)) / (np.sqrt(nu / (1 - optim.b2**t)) + optim.eps)
            self.master[name] = master - lr * step - lr * decay * master
