"""What every test gets: eight CPU devices, checked annotations, no implicit rank promotion."""

import os

from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
# The tower lets an int stand where a float is annotated, as type checkers do.
install_import_hook(["moejax", "moejax_kernels"], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
