"""Attention compiled for GPUs that are not here: cuDNN's kernels, memory that grows with the length, nothing that waits for the host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compile_attention import KINDS, LENGTHS

ROOT = Path(__file__).parents[2]
SHORT, LONG = map(str, LENGTHS)
CUDNN = [kind for kind, (dtype, *_) in KINDS.items() if dtype == "bfloat16"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["h200", "b300"])
def compiled(request):
    """What compile_attention.py says of one GPU, from a process of its own."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for GPUs needs JAX's CUDA plugin")
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-m", "tests.kernels.compile_attention", request.param]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, json.loads(done.stdout.splitlines()[-1])


def test_cudnn_runs_what_it_can_and_says_why(compiled):
    gpu, found = compiled
    for kind in CUDNN:
        for report in found["reports"][kind].values():
            assert report["kernels"] == {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}
        assert found["reasons"][kind] == f"cudnn, because it runs on 'NVIDIA {gpu.upper()}' in bfloat16 with heads of 128"
    assert not any("cudnn" in kernel for report in found["reports"]["float32"].values() for kernel in report["kernels"])
    assert found["reasons"]["float32"] == "xla, because cudnn takes bfloat16, not float32"


def test_memory_grows_with_the_length_and_not_its_square(compiled, capsys):
    gpu, found = compiled
    with capsys.disabled():
        print(
            f"\n{gpu}: temporary memory of attention forward and backward, 2 sequences, 16 heads of 128, 16 documents\n{'kind':<10}",
            end="",
        )
        print("".join(f"{length:>14,} tokens" for length in LENGTHS))
        for kind, reports in found["reports"].items():
            print(f"{kind:<10}" + "".join(f"{reports[length]['temp_bytes'] / 2**20:>17.1f} MiB" for length in (SHORT, LONG)))
    for reports in found["reports"].values():
        assert 3 < reports[LONG]["temp_bytes"] / reports[SHORT]["temp_bytes"] < 5
        assert all(report["most_scores"] <= 1 for report in reports.values()), "an array holds queries x keys"
        assert all(report["conditionals"] == 0 for report in reports.values())
