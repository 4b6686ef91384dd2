"""Which implementation and tile are chosen for which device, also for a device that is not here."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from moejax.errors import ConfigError
from moejax.parallel.expert import choose_kernel
from moejax_kernels import device
from moejax_kernels.device import platform
from moejax_kernels.grouped_matmul import choose_implementation, choose_tile, grouped_matmul

HOPPER = ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB")
BLACKWELL = ("NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC", "NVIDIA GB300")
OTHERS = ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA RTX PRO 6000 Blackwell", "AMD Instinct MI300X", "a device")
FITS = {"dtype": "bfloat16", "widths": (2048, 1024)}


def traced_for(name: str, kind: str = "a device", cores: int | None = None) -> contextlib.AbstractContextManager:
    """A mesh of one device of that platform in scope, as when compiling ahead of time."""
    described = AbstractDevice(device_kind=kind, num_cores=cores, platform=name)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("ep",), abstract_device=described))


@pytest.mark.parametrize(("name", "expected"), [("cpu", "cpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu")])
def test_platform_is_that_of_the_mesh_in_scope(name, expected):
    assert platform() == "cpu"
    with traced_for(name):
        assert platform() == expected


def test_platform_is_known_inside_shard_map():
    seen = []

    def body(x):
        seen.append(platform())
        return x

    mesh = jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec("ep"), out_specs=PartitionSpec("ep")), jnp.zeros(2))
    assert seen == ["cpu"]


@pytest.mark.parametrize("kind", HOPPER + BLACKWELL)
def test_a_gpu_is_known_by_its_name_and_its_cores(kind):
    with traced_for("gpu", kind, 132):
        assert device.gpu_generation() == ("sm90" if kind in HOPPER else "sm100")
        assert device.num_cores() == 132


def test_unknown_cores_are_an_error():
    with traced_for("gpu", "NVIDIA H200"), pytest.raises(ValueError, match="number of cores of 'NVIDIA H200' is unknown"):
        device.num_cores()


@pytest.mark.parametrize("kind", HOPPER + BLACKWELL)
@pytest.mark.parametrize("name", ["auto", "mosaic"])
def test_auto_takes_mosaic_on_the_gpus_it_is_written_for_and_says_why(kind, name):
    with traced_for("gpu", kind):
        choice = choose_implementation(name, **FITS)
    assert choice.name == "mosaic"
    assert choice.reason == f"mosaic, because {kind!r} has its instructions and widths 2048 and 1024 in bfloat16 fit its tiles"


def test_auto_takes_the_cpu_body_on_a_cpu_and_says_why():
    for dtype, widths in (("float32", (5, 6)), ("bfloat16", (128, 128))):
        choice = choose_implementation(dtype=dtype, widths=widths)
        assert (choice.name, choice.reason) == ("cpu", "cpu, because the device is 'cpu'")


REFUSED = [
    *(
        (kind, name, {}, r"mosaic runs on H100, H200, .* this device is '.*'; use 'reference', which is slow")
        for kind in OTHERS
        for name in ("auto", "mosaic")
    ),
    ("cpu", "mosaic", {}, "mosaic runs on H100, .* this device is 'cpu'; use 'cpu' or 'reference'"),
    *((kind, "cpu", {}, "cpu runs on CPUs, and this device is '.*'; use 'auto' or 'reference'") for kind in (*HOPPER, *BLACKWELL, *OTHERS)),
    (
        "NVIDIA H200",
        "auto",
        {"dtype": "float32"},
        "mosaic, the kernels for 'NVIDIA H200', multiply bfloat16, not float32; use dtype bfloat16, or 'reference'",
    ),
    ("NVIDIA B200", "mosaic", {"dtype": "float16"}, "multiply bfloat16, not float16"),
    (
        "NVIDIA H200",
        "mosaic",
        {"widths": (2048, 96)},
        "need widths that are multiples of 64, not 2048 and 96; change them, or use 'reference'",
    ),
    ("NVIDIA H200", "auto", {"tile": 64}, "need tile=128, not 64; take the tile from choose_tile"),
]


@pytest.mark.parametrize(("kind", "name", "changes", "sentence"), REFUSED)
def test_p04_what_does_not_run_is_refused_with_the_way_out(kind, name, changes, sentence):
    with traced_for("cpu" if kind == "cpu" else "gpu", kind), pytest.raises(NotImplementedError, match=sentence):
        choose_implementation(name, **(FITS | changes))


def test_p04_every_other_name_runs_on_a_cpu():
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((1, 4, 4)), jnp.array([8], jnp.int32)
    for name in ("auto", "reference", "cpu"):
        assert grouped_matmul(x, w, sizes, tile=8, implementation=name).tolist() == [[4] * 4] * 8


@pytest.mark.parametrize("kind", ["cpu", *HOPPER, *BLACKWELL, *OTHERS])
def test_the_definition_runs_anywhere_by_name(kind):
    with traced_for("cpu" if kind == "cpu" else "gpu", kind):
        choice = choose_implementation("reference", dtype="float32", widths=(5, 7))
    assert (choice.name, choice.reason) == ("reference", "reference, because it was asked for by name")


def test_a_refusal_names_the_settings():
    with traced_for("gpu", "NVIDIA H200"), pytest.raises(ConfigError) as refusal:
        choose_kernel("auto", dtype="bfloat16", embed_dim=1024, expert_dim=100)
    assert str(refusal.value) == (
        "model.moe.grouped_matmul=auto with model.dtype=bfloat16, model.embed_dim=1024 and model.moe.expert_dim=100: mosaic, the kernels "
        "for 'NVIDIA H200', need widths that are multiples of 64, not 1024 and 100; change them, or use 'reference', which is slow"
    )
    assert choose_kernel("auto", dtype="float32", embed_dim=10, expert_dim=7).name == "cpu"


def test_a_name_never_falls_back():
    x, w = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((1, 4, 4), jnp.float32)

    def product(x, w, sizes):
        return grouped_matmul(x, w, sizes, tile=8, implementation="cpu")

    with traced_for("gpu"), pytest.raises(NotImplementedError, match="cpu runs on CPUs, and this device is 'a device'"):
        jax.eval_shape(product, x, w, jax.ShapeDtypeStruct((1,), jnp.int32))


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="grouped_matmul='triton' is not one of auto, reference, cpu, mosaic"):
        choose_implementation("triton", **FITS)


def test_rows_are_aligned_for_accelerators_only():
    assert choose_tile() == 1
    with traced_for("gpu"):
        assert choose_tile() == 128
