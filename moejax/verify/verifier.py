"""Runs the cases of a config and holds each against the reference."""

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import TrainConfig
from moejax.errors import MoejaxError
from moejax.nn import Transformer, is_spec
from moejax.parallel import make_mesh
from moejax.testing import named_leaves
from moejax.train.step import make_grad_fn, put_batch
from moejax.verify.cases import Case
from moejax.verify.compare import Errors, compare
from moejax.verify.diagnose import signs
from moejax.verify.reference import Layout, Reference
from moejax.verify.shrink import shrink

_SEEDS = 20
_CASES_REMEMBERED = 16  # by JAX, which keeps some 15 MB of each


@dataclass(frozen=True)
class Outcome:
    """What became of a case: its errors and what they look like, or the sentence with which it was refused."""

    case: Case
    errors: Errors | None = None
    signs: tuple[str, ...] = ()
    refusal: str | None = None

    @property
    def differs(self) -> bool:
        return self.errors is not None and bool(self.errors.differences)


class Verifier:
    """A config shrunk to this machine, with parameters and a batch that rounding cannot route in two ways.

    Raises:
        MoejaxError: if there are none, as with a router that is not a function of its input; or the model does what float64 cannot.
    """

    def __init__(self, config: TrainConfig):
        self.small, self._keep = shrink(config), (config.model.recompute, config.model.recompute_keep)
        for seed in range(_SEEDS):
            self.reference = Reference(self.small, *make_inputs(self.small, seed))
            try:
                is_safe = self.reference.is_safe()
            except NotImplementedError as error:
                raise MoejaxError(f"the reference cannot run this model in float64: {error}") from error
            if is_safe:
                self.seed = seed
                return
        raise MoejaxError(
            f"in {_SEEDS} random models some token was nearly as close to another expert, so that rounding alone would route it elsewhere; "
            "is the router a function of its input, without jumps?"
        )

    def run(self, cases: Iterable[Case], report: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
        """All of them, each reported as soon as it is done. While one is run and compared, the next ones are compiled.

        Few programs exist at once: each takes some of the memory maps that a process may have.
        """
        outcomes, rest = [], iter(cases)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            waiting = deque((case, pool.submit(self._compiled, case)) for case in islice(rest, os.cpu_count()))
            while waiting:
                outcomes.append(self._outcome(*waiting.popleft()))
                report(outcomes[-1])
                if len(outcomes) % _CASES_REMEMBERED == 0:
                    jax.clear_caches()
                gc.collect()
                waiting.extend((case, pool.submit(self._compiled, case)) for case in islice(rest, 1))
        return outcomes

    def _outcome(self, case: Case, compiled: Future[Callable]) -> Outcome:
        try:
            metrics, gradients = compiled.result()()
        except MoejaxError as refusal:
            return Outcome(case, refusal=str(refusal))
        truth = self.reference.truth(layout_of(case))
        errors = compare(metrics, gradients, truth)
        return Outcome(case, errors, tuple(signs(case, errors.differences, gradients, truth)))

    def _compiled(self, case: Case) -> Callable[[], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """The gradient function of the training step in that case, compiled; its result are metrics and gradients by name."""
        mode, keep = self._keep
        config = case.config(self.small, keep if mode == case.recompute else ())
        mesh, given = make_mesh(config.mesh), self.reference
        router = {} if given.bias is None else {"bias": given.bias}
        arguments = given.params, router, jnp.int32(0), put_batch(given.batch, config, mesh)
        jitted: Any = make_grad_fn(config, mesh)
        program = jitted.lower(*arguments).compile()

        def run() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
            gradients, metrics = program(*arguments)
            return {name: np.asarray(value) for name, value in metrics.items()}, named_leaves(gradients)

        return run


def layout_of(case: Case) -> Layout:
    return Layout(case.dp, case.ep, case.microbatches)


def make_inputs(config: TrainConfig, seed: int) -> tuple[dict, np.ndarray | None, dict[str, np.ndarray]]:
    """Random parameters of a size at which every part of the model matters, router biases, and a batch."""
    rng, model = np.random.default_rng(seed), config.model

    def parameter(path: Any, spec: Any) -> np.ndarray:
        name = str(path[-1].key)
        spread = {"scale": 0.2, "w_embed": 1.0}.get(name, 1.0 / np.sqrt(max(model.embed_dim, 8)))
        return (rng.normal(size=spec.shape) * spread + (name == "scale")).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(parameter, Transformer(model).specs, is_leaf=is_spec)
    bias = None
    if model.moe is not None:
        bias = np.zeros((model.num_moe_layers, model.moe.num_experts), np.float32)
        if model.moe.router.bias_update_rate is not None:
            bias = rng.normal(scale=0.05, size=bias.shape).astype(np.float32)
    return params, bias, _batch(config, rng)


def _batch(config: TrainConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random text; with document masks two documents a sequence, and padding at the end of every other one."""
    shape = config.batch_size, config.data.seq_len
    text = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1))
    segments, positions = np.ones(shape, np.int64), np.tile(np.arange(shape[1]), (shape[0], 1))
    if config.data.document_mask:
        for row in range(shape[0]):
            cut = int(rng.integers(2, shape[1] - 4))
            segments[row, cut:] = 2
            positions[row, cut:] -= cut
            if row % 2:
                segments[row, shape[1] - int(rng.integers(1, 4)) :] = 0
    after = np.concatenate([segments[:, 1:], segments[:, -1:]], axis=1)
    labels = np.where((after == segments) & (segments != 0), text[:, 1:], -1)
    arrays = {"tokens": text[:, :-1], "labels": labels, "segment_ids": segments, "positions": positions}
    return {name: np.ascontiguousarray(value, np.int32) for name, value in arrays.items()}
