"""Freed memory is used again instead of being mapped and cleared anew."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from moejax.parallel import host_memory

SIZE = 64 * 2**20
PROGRAM = f"""
import resource, sys, threading, jax, jax.numpy as jnp
from moejax.parallel.host_memory import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
def use():
    block = bytearray(b"x") * {SIZE}
    jnp.ones({SIZE}, jnp.int8).block_until_ready()
    thread = threading.Thread(target=lambda: bytearray(b"x") * {SIZE})
    thread.start()
    thread.join()
for _ in range(2):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str) -> tuple[str, int]:
    """What keep_freed_memory returned, and page faults of using 64 MiB eight times in each of three ways."""
    command, environment = [sys.executable, "-c", PROGRAM, word], os.environ | {"JAX_PLATFORMS": "cpu"}
    kept, count = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()
    return kept, int(count)


def test_memory_that_was_freed_is_not_cleared_again_page_by_page():
    kept, count = faults("keep")
    if kept == "False":
        pytest.skip("the C library is not GNU's")
    assert 4 * count < faults("leave")[1]  # not 0: JAX frees when it pleases, and two may be alive at once


def test_on_accelerators_memory_is_left_alone(monkeypatch):
    calls = []
    library = SimpleNamespace(gnu_get_libc_version=None, mallopt=lambda option, value: calls.append((option, value)) or 1)
    monkeypatch.setattr(host_memory.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    assert not host_memory.keep_freed_memory()
    assert calls == [(host_memory._ARENA_MAX, 1), (host_memory._ARENA_MAX, 0)]  # as it was
