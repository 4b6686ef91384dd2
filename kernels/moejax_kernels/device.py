"""Which device a traced function is for, read from the mesh it is traced under."""

import jax


def platform() -> str:
    """Platform of the abstract mesh in scope ("cpu", "gpu", ...); the default backend outside any mesh.

    Inside `jax.shard_map` and in custom_vjp backward passes the mesh names the device that the program is compiled
    for, also when it is compiled ahead of time for a device that is not here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name
