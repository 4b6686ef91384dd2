"""Turns readings of the loop into records, figures of speed and what the user sees."""

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Any

from moejax.train.console import Screen, duration
from moejax.train.metrics import Reading, lists, memory, scalars
from moejax.train.sinks import Sink


class Log:
    """Keeps what figures over several steps need: the clock, tokens and skipped steps so far."""

    def __init__(
        self,
        screen: Screen,
        sinks: list[Sink],
        *,
        first: int,
        total: int,
        every: int,
        tokens_per_step: int,
        tokens_seen: int,
        flops_per_token: float,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Steps `first` to `total` follow; peak_flops is that of all devices together."""
        self._screen, self._sinks, self._clock = screen, sinks, clock
        self._first, self._total, self._every = first, total, every
        self._tokens_per_step, self._tokens_before = tokens_per_step, tokens_seen
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._since, self._since_step = clock(), first - 1
        self._data_wait_s = 0.0
        self._skipped = 0
        self._last: dict[str, Any] = {}

    def is_logged(self, step: int) -> bool:
        return step == self._first or step == self._total or step % self._every == 0

    def tokens_seen(self, step: int) -> int:
        """Positions trained on up to and with a step of this process."""
        return self._tokens_before + (step - self._first + 1) * self._tokens_per_step

    def add_data_wait(self, seconds: float) -> None:
        self._data_wait_s += seconds

    def steps(self, readings: list[Reading]) -> None:
        """Record steps in order, and show the last of them."""
        for reading in readings:
            record = {"kind": "train", "step": reading.step, "tokens_seen": self.tokens_seen(reading.step)} | scalars(reading.metrics)
            self._skipped += int(record.get("optim/skipped") or 0)
            is_logged = self.is_logged(reading.step)
            if is_logged:
                record |= lists(reading.metrics) | self._speed(reading.step) | memory()
            self._write(record, is_logged=is_logged)
            self._last |= record | {"skipped": self._skipped}
            if "speed/step_s" in self._last:
                self._last["eta_s"] = (self._total - reading.step) * self._last["speed/step_s"]
            self._screen.show_step(self._last, is_logged=is_logged)

    def evaluation(self, step: int, results: dict[str, Any], seconds: float) -> None:
        record = scalars(results)
        self._write({"kind": "eval", "step": step, "eval/seconds": round(seconds, 3)} | record)
        self._last |= {"eval/loss": record["eval/loss"], "step": step}
        self._screen.show_step(self._last, is_logged=False)
        self._screen.say(
            f"step {step}: held-out loss {results['eval/loss']:.4f} on {results['eval/tokens']:,} tokens ({duration(seconds)})"
        )

    def saved(self, step: int, seconds: float) -> None:
        self._write({"kind": "save", "step": step, "save/seconds": round(seconds, 3)})
        self._screen.say(f"step {step}: checkpoint saved ({seconds:.1f} s in the background)")

    def start(self, facts: dict[str, Any]) -> None:
        """Record what this process starts with; the clock of the steps runs from here."""
        self._write({"kind": "start", "step": self._first - 1} | facts)
        self._since = self._clock()

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Time spent in here is no training time."""
        begin = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - begin

    def summary(self) -> str:
        """The newest losses in words."""
        losses = [
            f"{words} {self._last[name]:.4f}"
            for words, name in (("training loss", "train/loss"), ("held-out loss", "eval/loss"))
            if self._last.get(name)
        ]
        return ", ".join(losses) + " nats per token"

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _speed(self, step: int) -> dict[str, Any]:
        """Means since the last logged step. The figures of tokens and FLOPs are for all devices together."""
        now, count = self._clock(), step - self._since_step
        step_s = max(now - self._since, 1e-9) / count
        tokens_per_s = self._tokens_per_step / step_s
        speed = {
            "speed/step_s": round(step_s, 6),
            "speed/tokens_per_s": round(tokens_per_s, 2),
            "speed/model_flops_per_s": round(tokens_per_s * self._flops_per_token),
            "speed/mfu": None if self._peak_flops is None else round(tokens_per_s * self._flops_per_token / self._peak_flops, 5),
            "speed/data_wait_s": round(self._data_wait_s / count, 6),
        }
        self._since, self._since_step, self._data_wait_s = now, step, 0.0
        return speed

    def _write(self, record: dict[str, Any], *, is_logged: bool = True) -> None:
        for sink in self._sinks:
            sink.write(record, is_logged=is_logged)
