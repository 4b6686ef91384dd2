"""The inner loop: enqueue step n + 1, then look at step n.

    device   |  step 1  |  step 2  |  step 3  |  step 4  |
    host     e1 e2      r1 e3      r2 e4      r3            e: enqueue, r: read metrics and report

The device finds the next step waiting whenever it ends one. The host waits for the device only to report a logged step
(never the newest), and so as to stay at most a few steps ahead.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from moejax.errors import TrainingError
from moejax.train.metrics import LateMetrics, Reading
from moejax.train.signals import Stop

MAX_NON_FINITE = 5
"""Consecutive steps without a finite loss and gradient, all skipped, after which training stops."""
_MAX_AHEAD = 4
"""Steps that may wait on the device: a signal is answered after no more than these."""

Step = Callable[[Any, Any], tuple[Any, dict[str, Any]]]


def run_steps(
    step: Step,
    state: Any,
    batches: Iterator[Any],
    *,
    first: int,
    last: int,
    stop: Stop,
    report: Callable[[list[Reading]], None],
    is_logged: Callable[[int], bool],
    poll: Callable[[], None],
) -> tuple[Any, int]:
    """Take steps `first` to `last`, one batch each; return the state and the last step taken, every step reported.

    Ends early, between steps, once `stop` holds a signal. `poll` is called before each step and raises what went wrong in
    the background; `report` gets readings in order.
    """
    late, done = LateMetrics(), first - 1
    while done < last and stop.signal is None:
        poll()
        batch = next(batches)
        done += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=done):
            state, metrics = step(state, batch)
        late.push(done, metrics)
        report(late.read(done - 1 if is_logged(done - 1) else done - _MAX_AHEAD))
    report(late.read(done))
    return state, done


class FiniteGuard:
    """Counts steps in a row that the step skipped because they were not finite."""

    def __init__(self, newest: Callable[[], str]) -> None:
        """`newest` says in words which checkpoint is the newest."""
        self._count = 0
        self._newest = newest

    def check(self, readings: list[Reading]) -> None:
        """Take readings in order.

        Raises:
            TrainingError: after MAX_NON_FINITE such steps in a row. None of them was applied.
        """
        for reading in readings:
            self._count = 0 if reading.metrics["optim/finite"] else self._count + 1
            if self._count >= MAX_NON_FINITE:
                before = reading.step - self._count
                raise TrainingError(
                    f"loss or gradient was not finite in steps {before + 1} to {reading.step}, none of which was applied; "
                    f"{self._newest()}. Lower optim.lr, lengthen the warm-up, or look at the data of these steps; then resume"
                )


def profiled(step: Step, directory: Path, *, start: int, count: int) -> Step:
    """The same step, with a jax.profiler trace of calls number `start` to `start + count - 1`, counted from 0."""
    calls = 0

    def traced(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        nonlocal calls
        if calls == start:
            jax.profiler.start_trace(directory)
        state, metrics = step(state, batch)
        calls += 1
        if calls == start + count:
            jax.block_until_ready(metrics)
            jax.profiler.stop_trace()
        return state, metrics

    return traced
