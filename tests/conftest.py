"""What every test gets: eight CPU devices, checked annotations, no implicit rank promotion."""

import os
from pathlib import Path

from jaxtyping import install_import_hook

import tests.typecheck  # noqa: F401

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests wait for the compiler far more than for its code: without LLVM's optimizer they take three quarters of the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
# Modules compile the same programs again, and so do programs that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# Not moejax.config and moejax.cli: they refuse wrong values with their own sentences, which are tested.
ARRAY_CODE = [f"moejax.{part}" for part in ("ops", "parallel", "nn", "models", "optim", "data", "checkpoint", "train", "eval", "generate")]
install_import_hook([*ARRAY_CODE, "moejax_kernels"], "tests.typecheck.check_functions")

import hypothesis  # noqa: E402
import jax  # noqa: E402

from moejax.parallel.flags import set_cpu_devices  # noqa: E402

set_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", False)

# Time limits would fail on a machine whose cores are busy, not on wrong code.
hypothesis.settings.register_profile("moejax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("moejax")
