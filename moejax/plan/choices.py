"""The kernels and the transport that a step would run with on a GPU that is not here, and why."""

import warnings

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from moejax.config import TrainConfig
from moejax.nn.attention import choose_attention
from moejax.parallel.expert.choice import choose_kernel, choose_transport
from moejax.plan.gpus import Gpu


def choices(config: TrainConfig, gpu: Gpu) -> dict[str, str]:
    """One sentence for each setting that leaves a choice, by the setting's name; needs neither the GPU nor JAX's CUDA plugin.

    Raises:
        ConfigError: if what the config asks for does not run on this GPU.
    """
    device = AbstractDevice(device_kind=gpu.device_kind, num_cores=gpu.cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("ep",), abstract_device=device)), warnings.catch_warnings(record=True) as known:
        warnings.simplefilter("always")
        found = {"model.attention.implementation": choose_attention(config.model).reason}
        if (moe := config.model.moe) is not None:
            kernel = choose_kernel(
                moe.grouped_matmul, dtype=config.model.dtype, embed_dim=config.model.embed_dim, expert_dim=moe.expert_dim
            )
            transport = choose_transport(moe.transport, config.mesh.ep).name
            why = (
                "asked for by name" if moe.transport == transport else f"chosen by {moe.transport} for {config.mesh.ep} ranks of {gpu.name}"
            )
            found |= {"model.moe.grouped_matmul": kernel.reason, "model.moe.transport": f"{transport}, {why}"}
    if config.model.precision == "mxfp8" and gpu.capability < (10, 0):
        found["model.precision"] = f"mxfp8, which {gpu.name} has no products in: they would be emulated in bfloat16, no faster than plain"
    return found | {f"warning {number}": str(warning.message) for number, warning in enumerate(known, start=1)}
