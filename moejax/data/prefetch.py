"""Batches made ahead of time by a background thread."""

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType


class Prefetch[T]:
    """Iterator over fn(start), ..., fn(stop - 1) that computes up to depth items ahead in one thread.

    An exception of fn is raised where its item would have come, and again by any later next(). Close it, or use it in a
    `with`, so that the thread ends even if not all items are taken.
    """

    def __init__(self, fn: Callable[[int], T], start: int, stop: int, *, depth: int = 2) -> None:
        self.wait_s = 0.0
        """Seconds that the last next() waited for its item."""
        self._free = threading.Semaphore(depth)
        self._results: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(fn, range(start, stop)), name="moejax-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Prefetch[T]":
        return self

    def __next__(self) -> T:
        if self._is_closed.is_set():
            raise StopIteration
        begin = time.perf_counter()
        result = self._results.get()
        self.wait_s = time.perf_counter() - begin
        if isinstance(result, Exception):
            self._results.put(result)
            raise result
        self._free.release()
        return result[0]

    def close(self) -> None:
        """End the thread once fn returns, and drop what it made. May be called again."""
        self._is_closed.set()
        self._free.release()
        self._thread.join()

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _work(self, fn: Callable[[int], T], numbers: range) -> None:
        for number in numbers:
            self._free.acquire()
            if self._is_closed.is_set():
                return
            try:
                self._results.put((fn(number),))
            except Exception as error:
                self._results.put(error)
                return
        self._results.put(StopIteration())


def prefetch[T](fn: Callable[[int], T], start: int, stop: int, *, depth: int = 2) -> Prefetch[T]:
    return Prefetch(fn, start, stop, depth=depth)
