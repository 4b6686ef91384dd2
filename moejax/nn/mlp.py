"""Dense MLP, routed experts and shared experts: SwiGLU everywhere, gate and up in one weight."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.config import ModelConfig, MoEConfig
from moejax.nn.param import param
from moejax.ops.routing import score
from moejax.ops.swiglu import swiglu
from moejax.parallel.expert import choose_kernel
from moejax_kernels.grouped_matmul import grouped_matmul


class Mlp(nnx.Module):
    """The MLP of a dense block."""

    def __init__(self, config: ModelConfig):
        dim, hidden, std = config.embed_dim, config.mlp_dim, config.init_std
        self.w_in = param(dim, 2, hidden, axes=("embed", "gate_up", "mlp"), std=std)
        self.w_out = param(hidden, dim, axes=("mlp", "embed"), std=std)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate_up = checkpoint_name(jnp.einsum("btd,dgf->btgf", x, self.w_in[...]), "mlp_gate_up")
        return swiglu(gate_up) @ self.w_out[...]


class Experts(nnx.Module):
    """The routed experts that live on this device."""

    def __init__(self, dim: int, moe: MoEConfig, std: float):
        count, hidden = moe.num_experts, moe.expert_dim
        self.kernel = moe.grouped_matmul
        self.w_in = param(count, dim, 2, hidden, axes=("expert", "embed", "gate_up", "mlp"), std=std)
        self.w_out = param(count, hidden, dim, axes=("expert", "mlp", "embed"), std=std)

    def __call__(self, rows: Float[Array, "R D"], group_sizes: Int[Array, " X"], tile: int) -> Float[Array, "R D"]:
        """Apply each expert to its rows, which lie in the tile-aligned layout. Reads x once for gate and up together."""
        w_in, w_out = self.w_in[...], self.w_out[...]
        _, dim, _, hidden = w_in.shape
        kernel = choose_kernel(self.kernel, dtype=str(rows.dtype), embed_dim=dim, expert_dim=hidden).name
        gate_up = checkpoint_name(grouped_matmul(rows, w_in, group_sizes, tile=tile, implementation=kernel), "expert_gate_up")
        return grouped_matmul(swiglu(gate_up), w_out, group_sizes, tile=tile, implementation=kernel)

    def alone(self, x: Float[Array, "BT D"], expert: Int[Array, ""]) -> Float[Array, "BT D"]:
        """What one expert makes of any rows: the definition that `moejax verify` holds grouped products against."""
        w_in, w_out = (w[...][expert] for w in (self.w_in, self.w_out))
        return swiglu(jnp.einsum("td,dgf->tgf", x, w_in)) @ w_out


class SharedExperts(nnx.Module):
    """Experts that see every token. Two or more are weighted by a dense router of their own, whose scores are not a choice."""

    def __init__(self, dim: int, moe: MoEConfig, std: float):
        count, hidden = moe.num_shared_experts, moe.shared_expert_dim
        self.gating = moe.router.gating
        self.w_in = param(count, dim, 2, hidden, axes=("shared", "embed", "gate_up", "mlp"), std=std)
        self.w_out = param(count, hidden, dim, axes=("shared", "mlp", "embed"), std=std)
        if count > 1:
            self.w_router = param(dim, count, axes=("embed", "shared"), std=std, dtype="float32")

    def __call__(self, x: Float[Array, "BT D"]) -> Float[Array, "BT D"]:
        hidden = swiglu(checkpoint_name(jnp.einsum("td,sdgf->tsgf", x, self.w_in[...]), "shared_gate_up"))
        if hidden.shape[1] > 1:
            logits = router_logits(x, self.w_router[...])
            hidden = (hidden * score(logits, self.gating)[..., None]).astype(x.dtype)
        return jnp.einsum("tsf,sfd->td", hidden, self.w_out[...])


@functools.partial(jax.checkpoint, prevent_cse=False)
def router_logits(x: Float[Array, "BT D"], w_router: Float[Array, "D E"]) -> Float[Array, "BT E"]:
    """Float32 logits of float32 operands, whatever the compute dtype, at full precision on every device.

    The backward pass keeps x as it came, not its float32 copy.
    """
    return jnp.dot(x.astype(jnp.float32), w_router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
