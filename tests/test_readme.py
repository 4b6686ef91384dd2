"""What the README shows runs, and what it names exists."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.testing import assert_scalar_close, assert_trees_close
from tests.nn.dense_moe import dense_moe, plain

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def example(heading: str) -> str:
    """The program under a heading."""
    [program] = re.findall(r"```python\n(.*?)```", README.split(f"## {heading}\n")[1].split("\n## ")[0], flags=re.DOTALL)
    return program


def test_library_example_trains(capsys):
    program = example("Use it as a library")
    assert len(program.splitlines()) <= 20

    exec(compile(program, "README.md", "exec"), {})

    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_model_with_the_layer_equals_a_dense_computation():
    program, names = example("In your own Flax model"), {}
    assert len([line for line in program.splitlines() if line]) <= 15
    exec(compile(program, "README.md", "exec"), names)
    model = names["Model"](nnx.Rngs(0))
    x, target = jax.random.normal(jax.random.key(1), (4, 6, 16)), jax.random.normal(jax.random.key(2), (4, 6, 1))

    def loss(model):
        y, aux_loss = model(x)
        return jnp.mean((y - target) ** 2) + aux_loss

    value, grads = nnx.jit(nnx.value_and_grad(loss))(model)

    def dense_loss(params):
        inner, outer = params["inner"], params["outer"]
        y, stats = dense_moe(params["moe"]["moe"], x @ inner["kernel"] + inner["bias"][None, None], top_k=2, devices=8)
        return jnp.mean((y @ outer["kernel"] + outer["bias"][None, None] - target) ** 2) + 0.01 * stats["balance_loss"]

    with jax.default_matmul_precision("highest"):
        truth, dense_grads = jax.jit(jax.value_and_grad(dense_loss))(jax.device_get(plain(nnx.state(model))))
    assert_scalar_close(value, truth, "float32", "loss")
    assert_trees_close(plain(grads), dense_grads, "float32", "gradients")


def test_named_files_and_commands_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile
