"""Which attention runs where, and what is refused with which words."""

import jax
import jax.numpy as jnp
import pytest

from moejax.config import ModelConfig
from moejax.errors import ConfigError
from moejax.nn.attention import choose_attention
from moejax_kernels.attention import Places, attention, choose_implementation
from tests.kernels.test_choice import BLACKWELL, HOPPER, OTHERS, traced_for
from tests.oracle.examples import model_config

FITS = {"dtype": "bfloat16", "head_dim": 128}


@pytest.mark.parametrize("kind", HOPPER + BLACKWELL)
@pytest.mark.parametrize("name", ["auto", "cudnn"])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_cudnn_runs_on_hopper_and_blackwell_in_bfloat16(kind, name, head_dim):
    with traced_for("gpu", kind):
        choice = choose_implementation(name, dtype=jnp.bfloat16, head_dim=head_dim)
    assert choice.name == "cudnn"
    assert choice.reason == f"cudnn, because it runs on '{kind}' in bfloat16 with heads of {head_dim}"


REFUSALS = [
    ("gpu", "NVIDIA H200", {"dtype": "float32"}, "cudnn takes bfloat16, not float32"),
    ("gpu", "NVIDIA B300", {"head_dim": 100}, "cudnn takes heads of a multiple of 8 up to 128, not of 100"),
    ("gpu", "NVIDIA B300", {"head_dim": 192}, "cudnn takes heads of a multiple of 8 up to 128, not of 192"),
    *[
        (platform, kind, {}, f"cudnn runs on H100, H200, GH200, B200, GB200, B300 and GB300, and this device is '{kind}'")
        for platform, kind in [*(("gpu", kind) for kind in OTHERS), ("cpu", "a CPU")]
    ],
]


@pytest.mark.parametrize(("platform", "kind", "change", "reason"), REFUSALS)
def test_what_cudnn_cannot_is_xlas_or_refused_with_the_reason(platform, kind, change, reason):
    with traced_for(platform, kind):
        choice = choose_implementation(**(FITS | change))
        assert (choice.name, choice.reason) == ("xla", f"xla, because {reason}")
        with pytest.raises(NotImplementedError) as caught:
            choose_implementation("cudnn", **(FITS | change))
        assert str(caught.value) == f"{reason}; use 'xla' or 'auto'"
        assert choose_implementation("xla", **(FITS | change)).reason == "xla, because it was asked for by name"


def test_here_the_reason_names_the_cpu():
    assert choose_implementation(dtype="float32", head_dim=64).reason.endswith("B300 and GB300, and this device is a cpu")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="attention='flash' is not one of auto, xla, cudnn"):
        choose_implementation("flash", **FITS)


def windowed(**model) -> ModelConfig:
    return model_config(attention={"num_heads": 2, "implementation": "cudnn"}, **model)


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("NVIDIA H200", "float32", "cudnn takes bfloat16, not float32; use 'xla' or 'auto'"),
        ("NVIDIA A100", "bfloat16", "cudnn runs on H100, .* this device is 'NVIDIA A100'; use 'xla' or 'auto'"),
    ],
)
def test_a_setting_that_the_device_cannot_take_is_refused_by_its_name(kind, dtype, message):
    with (
        traced_for("gpu", kind),
        pytest.raises(ConfigError, match=f"model.attention.implementation=cudnn with model.dtype={dtype} and heads of 8: {message}"),
    ):
        choose_attention(windowed(dtype=dtype))
    with traced_for("gpu", "NVIDIA H200"):
        assert choose_attention(windowed(dtype="bfloat16")).name == "cudnn"


Q = jax.ShapeDtypeStruct((2, 4, 2, 8), jnp.bfloat16)
SHORTER = jax.ShapeDtypeStruct((2, 3, 2, 8), jnp.bfloat16)


@pytest.mark.parametrize(
    ("q", "window", "max_documents", "message"),
    [
        (Q, jnp.int32(3), 1, "compiles the window into the kernel; give a number"),
        (Q, 3, None, "needs max_documents"),
        (SHORTER, 3, 1, "takes whole sequences, not 3 queries of 4 keys; use xla with a cache"),
    ],
)
def test_what_cudnn_has_to_know_is_asked_for(q, window, max_documents, message):
    at = Places(jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4), jnp.int32))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda q, k: attention(q, k, k, at, at, window=window, implementation="cudnn", max_documents=max_documents), q, Q)
