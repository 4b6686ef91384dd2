"""Learning rate over time, from optax's schedules."""

import optax

from moejax.config import OptimConfig


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of the n-th step, n from 1 to `steps` (so the first step of a warm-up is not wasted on a rate of 0)."""
    s, end = config.schedule, config.lr * config.schedule.final_fraction
    rest = max(steps - s.warmup_steps, 1)
    if s.kind == "cosine":
        main = optax.cosine_decay_schedule(config.lr, rest, alpha=s.final_fraction)
    elif s.kind == "wsd":
        stable = rest - s.decay_steps
        decay = optax.linear_schedule(config.lr, end, s.decay_steps)
        main = optax.join_schedules([optax.constant_schedule(config.lr), decay], [stable])
    else:
        main = optax.constant_schedule(config.lr)
    if s.warmup_steps == 0:
        return main
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, s.warmup_steps), main], [s.warmup_steps])
