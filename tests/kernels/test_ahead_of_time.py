"""The GPU kernels on a machine without one: every kernel lowers, and compiled for a GPU uses its tensor cores and copy engine."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from moejax_kernels.grouped_matmul import grouped_matmul
from tests.kernels.compile_kernels import BUFFER, EXPERTS, ROWS, K, N

ROOT = Path(__file__).parents[2]
KINDS = ("forward", "dgrad", "wgrad")


@pytest.mark.parametrize(("gpu", "cores", "generation"), [("NVIDIA H200", 132, "sm90"), ("NVIDIA GB300", 152, "sm100")])
def test_p03_every_gpu_kernel_lowers_without_a_gpu(gpu, cores, generation):
    def product_and_gradients(x, w, dy, sizes):
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, tile=128), x, w)
        return y, pullback(dy)

    mesh = AbstractMesh((1,), ("ep",), abstract_device=AbstractDevice(device_kind=gpu, num_cores=cores, platform="gpu"))
    mapped = jax.shard_map(product_and_gradients, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((384, 128), (2, 128, 64), (384, 64)))
    lowered = jax.jit(mapped).trace(x, w, dy, jax.ShapeDtypeStruct((2,), jnp.int32)).lower(lowering_platforms=("cuda",))
    for kind in KINDS:
        assert f"grouped_{kind}_{generation}" in lowered.as_text()


@pytest.fixture(scope="module", params=["h200", "b200", "b300"])
def compiled(request, tmp_path_factory):
    """What compile_kernels.py says of one GPU, from a process of its own: Mosaic keeps kernels whatever they were compiled for."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for GPUs needs JAX's CUDA plugin")
    folder = tmp_path_factory.mktemp(request.param)
    dumps = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", request.param]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dumps | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_kernels_use_tensor_cores_and_the_copy_engine_without_spills(compiled, capsys):
    gpu, report = compiled
    target, multiply = {"h200": ("sm_90a", "wgmma"), "b200": ("sm_100a", "tcgen05"), "b300": ("sm_103a", "tcgen05")}[gpu]
    with capsys.disabled():
        print(f"\n{'kernel':<8} {'GPU':<5} {'target':<8} {'registers':>9} {'shared memory':>13} {'TMEM columns':>12}  instructions")
        for kind in KINDS:
            kernel = report["kernels"][kind]
            found = kernel["instructions"]
            numbers = f"{kernel['registers']:>9} {kernel['shared_bytes']:>13} {kernel['tensor_memory_columns']:>12}"
            print(f"{kind:<8} {gpu:<5} {kernel['target']:<8} {numbers}  {', '.join(f'{n} {name}' for name, n in sorted(found.items()))}")
    for kind in KINDS:
        kernel = report["kernels"][kind]
        assert kernel["target"] == target
        assert kernel["spilled_bytes"] == 0
        names = " ".join(kernel["instructions"])
        assert multiply in names
        assert ("kind::f16" if multiply == "tcgen05" else "f32.bf16.bf16") in names
        assert "cp.async.bulk.tensor" in names
        assert kernel["tensor_memory_columns"] == (256 if multiply == "tcgen05" else 0)


@pytest.mark.slow
def test_p01_nothing_is_as_large_as_groups_times_rows(compiled, capsys):
    gpu, report = compiled
    with capsys.disabled():
        print(f"\n{gpu}: {report['choice']}")
    assert report["choice"].startswith("mosaic")
    for program in report["programs"].values():
        assert program["temp_bytes"] < 3 * BUFFER * N * 2
        for shape in program["shapes"]:
            assert not (EXPERTS in shape and {ROWS, BUFFER} & set(shape)), shape
            assert not {EXPERTS * K, EXPERTS * N, EXPERTS * ROWS} & set(shape), shape
            assert math.prod(shape) <= EXPERTS * K * N, shape


@pytest.mark.slow
def test_weights_and_rows_are_read_as_they_lie_in_memory(compiled):
    _, report = compiled
    for program in report["programs"].values():
        assert program["moved"] == []
