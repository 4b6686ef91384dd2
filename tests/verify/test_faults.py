"""Faults that were made in training stacks, made here on purpose: each is found, placed and named."""

import dataclasses
from unittest import mock

import jax
import pytest
from jax import lax

from moejax.config import load_config
from moejax.errors import MoejaxError
from moejax.nn.moe import Router
from moejax.nn.recompute import recomputed
from moejax.parallel import zero
from moejax.parallel.expert.plan import portion
from moejax.parallel.pipeline.table import columns
from moejax.train.microbatches import Microbatches
from moejax.verify import Case, Verifier
from moejax.verify.text import verdict

CONFIG = load_config("quickstart", ("--model.moe.capacity-factor", "0.9"))
ONE = Case(grouped_matmul="cpu")
EP = Case(ep=4, microbatches=2, grouped_matmul="cpu")
PP = Case(pp=2, microbatches=4, schedule="1f1b", grouped_matmul="cpu")
AGAIN = dataclasses.replace(ONE, recompute="block")


def report(*cases: Case) -> str:
    outcomes = Verifier(CONFIG).run(cases)
    return "\n".join(verdict(outcomes))


def divided(grads, rules):
    grads = zero.reduce_gradients(grads, rules)
    experts = jax.tree.map(lambda g: g / lax.axis_size("ep"), grads["moe_blocks"]["moe"]["experts"])
    return grads | {"moe_blocks": grads["moe_blocks"] | {"moe": grads["moe_blocks"]["moe"] | {"experts": experts}}}


def test_nothing_differs_in_a_healthy_program():
    assert "2 of 2 cases are equal to the reference" in report(EP, PP)


@pytest.mark.slow
def test_expert_gradients_divided_once_too_often():
    with mock.patch("moejax.train.step.zero", mock.Mock(wraps=zero, reduce_gradients=divided)):
        text = report(ONE, EP)
    assert "1 of 2 cases are equal to the reference" in text
    assert "gradient: moe_blocks.moe.experts.w_in, layer 1, expert 0" in text
    assert "it shows exactly where mesh.ep is above 1" in text
    assert "gradients of routed experts are 0.25 times what they should be, 1 / mesh.ep: divided once too often" in text


@pytest.mark.slow
def test_a_balance_loss_without_a_gradient():
    whole = Microbatches.router_total
    with mock.patch.object(Microbatches, "router_total", lambda self, stats: lax.stop_gradient(whole(self, stats))):
        text = report(ONE)
    assert "it differs in every case, on one device too" in text
    assert "exactly the gradient of the balance loss" in text
    assert "is missing: detached on its way" in text


@pytest.mark.slow
def test_kept_results_of_another_microbatch():
    def stale(schedule):
        table = columns(schedule)
        return table | {"kept": (table["kept"] + 1) % (table["keep"].max() + 1)}

    with mock.patch("moejax.parallel.pipeline.executor.columns", stale):
        text = report(ONE, PP)
    assert "it shows exactly where mesh.pp is above 1" in text
    assert "pipeline slots of another microbatch (a stale slot)" in text


@pytest.mark.slow
def test_a_capacity_that_is_off_by_one():
    def short(**sizes):
        chunks, size, accepted = portion(**sizes)
        return chunks, size, accepted - 1

    with mock.patch("moejax.parallel.expert.layer.portion", short):
        text = report(EP)
    assert "drops: dropped routes, layer 0" in text
    assert "every rank that drops takes exactly one row less than its capacity: off by one where the tail is cut" in text


@pytest.mark.slow
def test_a_loss_that_recomputation_counts_twice():
    def twice(block, config, **how):
        def doubled(*args):
            (y, scalar), rest = block(*args)
            return (y, 2 * scalar), rest

        return recomputed(doubled if config.recompute != "none" else block, config, **how)

    with mock.patch("moejax.nn.transformer.recomputed", twice):
        text = report(ONE, AGAIN)
    assert "it shows exactly where model.recompute is not none" in text
    assert "is there twice: counted again on its way" in text


class Capped(Router):
    """A router as a user would write it: logits that cannot grow beyond 2, and a floor under every weight."""

    def __call__(self, x, tokens, bias, layer):
        routes, logits = super().__call__(x, tokens, bias, layer)
        return routes._replace(weights=0.1 + 0.9 * routes.weights), 2 * jax.numpy.tanh(logits / 2)


@pytest.mark.slow
def test_a_router_that_the_user_wrote():
    with mock.patch("moejax.nn.moe.Router", Capped):
        healthy = report(EP)
        with mock.patch("moejax.train.step.zero", mock.Mock(wraps=zero, reduce_gradients=divided)):
            text = report(EP)
    assert "1 of 1 cases are equal to the reference" in healthy
    assert "divided once too often" in text


def test_a_model_that_float64_cannot_run_is_refused():
    class Looping(Router):
        def __call__(self, x, tokens, bias, layer):
            return super().__call__(lax.while_loop(lambda y: y.sum() > 0, lambda y: y - 1, x), tokens, bias, layer)

    with mock.patch("moejax.nn.moe.Router", Looping), pytest.raises(MoejaxError, match="in float64: a loop of unknown length"):
        Verifier(CONFIG)
