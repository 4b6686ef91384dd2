"""A run from its config to its last checkpoint: everything that touches files, clocks and the terminal hangs together here."""

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from moejax import checkpoint
from moejax.config import SYSTEM_REFERENCE, ModelConfig, MoEConfig, TrainConfig, to_dict
from moejax.config.check import check
from moejax.data import Dataset, Prefetch, open_data
from moejax.errors import TrainingError
from moejax.nn.attention import choose_attention
from moejax.nn.recompute import describe_offload
from moejax.parallel import make_mesh
from moejax.parallel.expert import choose_kernel, choose_transport
from moejax.train import flops
from moejax.train.console import Screen, short
from moejax.train.durable import abstract_durable, durable, from_durable
from moejax.train.evaluate import evaluate, make_eval_step
from moejax.train.locate import stop_where_not_finite
from moejax.train.log import Log
from moejax.train.metrics import Reading
from moejax.train.picture import draw_run
from moejax.train.run_dir import Run, begin, open_run, writing
from moejax.train.signals import Stop, watch_signals
from moejax.train.sinks import open_sinks, require_sinks
from moejax.train.state import TrainState, init_state
from moejax.train.step import Batch, make_train_step, put_batch
from moejax.train.steps import FiniteGuard, Step, profiled, run_steps


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a run consists of while it lasts."""

    config: TrainConfig
    run: Run
    mesh: Mesh
    dataset: Dataset
    screen: Screen
    stop: Stop
    writer: checkpoint.Writer
    log: Log
    evaluate: Callable[[TrainState, Callable[[], bool]], dict[str, Any] | None]


def train(config: TrainConfig) -> int:
    """Train as the config says, from the start or from the newest checkpoint of its run directory.

    Returns:
        0 if the run is finished, 130 or 143 if Ctrl-C or SIGTERM stopped it (a checkpoint is written first).

    Raises:
        MoejaxError: if it cannot start or go on; the message says why and what to do.
    """
    with contextlib.ExitStack() as stack:
        screen = stack.enter_context(Screen())
        stop = stack.enter_context(watch_signals(screen.say))
        require_sinks(config.log)
        mesh, dataset = make_mesh(config.mesh), open_data(config)
        jitted = make_train_step(config, mesh)  # traces nothing yet, but refuses what does not fit
        run = stack.enter_context(open_run(config))
        for note in run.notes:
            screen.say(note)
        if run.done >= config.steps:
            screen.say(f"this run has finished its {run.done} steps; raise steps to continue it, for example --steps {2 * run.done}")
            return 0
        _check_profile(config, run)
        for sentence in _describe(config, mesh, dataset):
            screen.say(sentence)
        state = _first_state(config, mesh, run)
        step, compile_s = _compile(jitted, config, mesh, dataset, run, state, screen)
        begin(run, config)
        log = _open_log(config, mesh, dataset, run, screen, compile_s)
        stack.callback(log.close)
        writer = checkpoint.Writer(run.checkpoints, keep=config.checkpoint.keep, keep_every=config.checkpoint.keep_every)
        stack.callback(writer.close)
        session = Session(
            config=config,
            run=run,
            mesh=mesh,
            dataset=dataset,
            screen=screen,
            stop=stop,
            writer=writer,
            log=log,
            evaluate=_make_evaluate(config, mesh, dataset),
        )
        return _finish(session, _train_on(session, step, state))


def _train_on(session: Session, step: Step, state: TrainState) -> int:
    """Train from one point where something is saved or evaluated to the next; return the steps done at the end."""
    config, stop, log = session.config, session.stop, session.log
    done, guard = session.run.done, FiniteGuard(lambda: _newest(session))

    def report(readings: list[Reading]) -> None:
        log.steps(readings)
        guard.check(readings)

    def put(index: int) -> Batch:
        samples = session.dataset.sequences(_samples_seen(session.run, config, index), config.batch_size)
        return put_batch(samples, config, session.mesh)

    saved = done
    session.screen.start_live(f"{config.name} in {session.run.path}", config.steps)
    with Prefetch(put, done, config.steps) as prefetched:
        batches = _timed(prefetched, log)
        while done < config.steps and stop.signal is None:
            begun = done
            state, done = run_steps(
                step,
                state,
                batches,
                first=done + 1,
                last=_next_pause(config, done),
                stop=stop,
                report=report,
                is_logged=log.is_logged,
                poll=lambda: _report_save(log, session.writer.poll()),
            )
            if done > begun:
                with log.paused():
                    saved = _save_and_evaluate(session, done, saved, state)
        if done > saved:  # a signal came after the last chance to save
            _save(session, done, state)
    _report_save(log, session.writer.wait())
    session.screen.end_live()
    return done


def _next_pause(config: TrainConfig, done: int) -> int:
    """The next step after which something is saved or evaluated."""
    intervals = (config.checkpoint.every, config.eval.every or config.steps)
    return min(config.steps, *((done // every + 1) * every for every in intervals))


def _timed(batches: Prefetch[Batch], log: Log) -> Iterator[Batch]:
    for batch in batches:
        log.add_data_wait(batches.wait_s)
        yield batch


def _save_and_evaluate(session: Session, done: int, saved: int, state: TrainState) -> int:
    """Whatever is due after this step, both at the end; return the step of the newest checkpoint, which was `saved`.

    A signal ends an evaluation, but not the last one: then nothing is left to resume that would make up for it.
    """
    config, is_last = session.config, done == session.config.steps
    if not _is_finite(state.master):
        raise TrainingError(
            f"the weights are not finite after step {done}, so they are not saved; {_newest(session)}. Lower optim.lr and resume"
        )
    if done % config.checkpoint.every == 0 or is_last:
        _save(session, done, state)
        saved = done
    if config.eval.every is not None and (done % config.eval.every == 0 or is_last):
        begin_s = time.perf_counter()
        results = session.evaluate(state, lambda: session.stop.signal is not None and not is_last)
        if results is not None:
            session.log.evaluation(done, results, time.perf_counter() - begin_s)
    return saved


def _save(session: Session, done: int, state: TrainState) -> None:
    _report_save(session.log, session.writer.wait())
    about = {
        "tokens_seen": session.log.tokens_seen(done),
        "samples_seen": _samples_seen(session.run, session.config, done),
        "config": to_dict(session.config),
    }
    session.writer.save(done, durable(session.config, session.mesh, state), about)


def _samples_seen(run: Run, config: TrainConfig, done: int) -> int:
    """Sequences trained on after `done` steps; steps before this process may have had another batch size."""
    return run.samples_seen + (done - run.done) * config.batch_size


def _report_save(log: Log, finished: tuple[int, float] | None) -> None:
    if finished is not None:
        log.saved(*finished)


@jax.jit
def _is_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _newest(session: Session) -> str:
    _report_save(session.log, session.writer.wait())
    steps = checkpoint.committed_steps(session.run.checkpoints)
    return f"the newest checkpoint is {steps[-1]}" if steps else "there is no checkpoint yet"


def _first_state(config: TrainConfig, mesh: Mesh, run: Run) -> TrainState:
    """A fresh state, or that of the checkpoint to go on from."""
    if run.step is None:
        return init_state(config, mesh)
    return from_durable(config, mesh, checkpoint.restore(run.checkpoints, run.step, abstract_durable(config, mesh)))


def _compile(
    jitted: Any, config: TrainConfig, mesh: Mesh, dataset: Dataset, run: Run, state: TrainState, screen: Screen
) -> tuple[Step, float]:
    """The step compiled ahead of time, so that nothing can compile it twice; with --profile, its trace."""
    screen.say("compiling the step ...")
    begin_s = time.perf_counter()
    traced = jitted.trace(state, put_batch(dataset.batch(run.done), config, mesh))
    if config.model.recompute == "offload":
        screen.say(describe_offload(config.model, traced.jaxpr))
    step = traced.lower().compile()
    compile_s = time.perf_counter() - begin_s
    screen.say(f"compiled in {compile_s:.1f} s")
    if config.debug_nans:
        step = stop_where_not_finite(step, config, mesh)
    if config.profile:
        step = profiled(step, run.path / "profile", start=config.log.profile_start, count=config.log.profile_steps)
    return step, compile_s


def _make_evaluate(config: TrainConfig, mesh: Mesh, dataset: Dataset) -> Callable[[TrainState, Callable[[], bool]], dict[str, Any] | None]:
    eval_step = make_eval_step(config, mesh)
    return lambda state, is_stopped: evaluate(config, mesh, eval_step, state.params, state.router, dataset, is_stopped)


def _check_profile(config: TrainConfig, run: Run) -> None:
    steps, start, count = config.steps - run.done, config.log.profile_start, config.log.profile_steps
    check(
        not config.profile or start + count <= steps,
        f"profile=True with log.profile_start={start} and log.profile_steps={count} needs {start + count} steps, but {steps} are left; "
        "lower them or raise steps",
    )


def _open_log(config: TrainConfig, mesh: Mesh, dataset: Dataset, run: Run, screen: Screen, compile_s: float) -> Log:
    kind = mesh.devices.flat[0].device_kind
    per_token = sum(flops.flops_per_token(config.model, config.data.seq_len).values())
    peak = flops.peak_flops(kind)
    log = Log(
        screen,
        open_sinks(config, run),
        first=run.done + 1,
        total=config.steps,
        every=config.log.every,
        tokens_per_step=config.batch_size * config.data.seq_len,
        tokens_seen=run.tokens_seen,
        flops_per_token=per_token,
        peak_flops=None if peak is None else peak * mesh.size,
    )
    total, active = flops.count_parameters(config.model)
    log.start(
        {
            "compile_s": round(compile_s, 3),
            "devices": mesh.size,
            "device_kind": kind,
            "mesh": dict(mesh.shape),
            "parameters": total,
            "active_parameters": active,
            "flops_per_token": per_token,
            "unigram_entropy": round(dataset.unigram_entropy(), 5),
        }
    )
    return log


def _describe(config: TrainConfig, mesh: Mesh, dataset: Dataset) -> list[str]:
    """What is going to run, in a few lines."""
    model, batch = config.model, config.batch_size
    total, active = flops.count_parameters(model)
    per_token = short(sum(flops.flops_per_token(model, config.data.seq_len).values()))
    tokens = batch * config.data.seq_len
    split = f" in {config.microbatches} microbatches" if config.microbatches > 1 else ""
    lines = [
        f"devices    {mesh.size} x {mesh.devices.flat[0].device_kind}, {config.mesh.words}",
        f"model      {short(total)} parameters, {short(active)} active for a token; {per_token} FLOP to train on one; {model.dtype}",
        f"attention  {choose_attention(model).reason}",
        f"data       {dataset.describe()}",
        f"steps      {config.steps} of {batch} sequences{split} = {short(tokens)} tokens each, {short(tokens * config.steps)} in all",
    ]
    if model.moe is not None:
        lines.insert(2, _describe_experts(model, model.moe, config.mesh.ep))
    if model.is_system_reference:
        lines.append(f"warning    {SYSTEM_REFERENCE}")
    return lines


def _describe_experts(model: ModelConfig, moe: MoEConfig, ranks: int) -> str:
    capacity = "dropless" if moe.capacity_factor is None else f"capacity factor {moe.capacity_factor:g}"
    kernel = choose_kernel(moe.grouped_matmul, dtype=model.dtype, embed_dim=model.embed_dim, expert_dim=moe.expert_dim).name
    transport = choose_transport(moe.transport, ranks).name
    place = f"{ranks} ranks" if ranks > 1 else "1 rank"
    return f"experts    {moe.num_experts} on {place}, {moe.top_k} for a token, {capacity}; {kernel} kernel, {transport} transport"


def _finish(session: Session, done: int) -> int:
    """Say how it ended, where things are and what to do next; return the exit code."""
    config, run, say = session.config, session.run, session.screen.say
    place = shlex.quote(str(run.path))
    if session.stop.signal is not None and done < config.steps:
        say(f"stopped by {session.stop.signal.name} after step {done} of {config.steps}; {_newest(session)}, in {run.checkpoints}")
        say(f"to go on   {_command()}")
        return session.stop.exit_code
    say(f"finished   {done} steps, {short(session.log.tokens_seen(done))} tokens; {session.log.summary()}")
    say(f"checkpoint {run.checkpoints / str(done)}")
    with writing(run.path):
        say(f"picture    {draw_run(run.path)}")
    say(f"evaluate   moejax eval {place}")
    if session.dataset.tokenizer is not None:
        say(f'generate   moejax generate {place} --prompt "..."')
    say(f"go on      {_command(2 * done)}")
    return 0


def _command(steps: int | None = None) -> str:
    """The command that started this process, as the user would type it again, perhaps with another number of steps."""
    more = [] if steps is None else ["--steps", str(steps)]
    if Path(sys.argv[0]).name != "moejax":
        return f"the same command with {shlex.join(more)}" if more else "the same command"
    words = shlex.join(["moejax", *sys.argv[1:]])
    return f"{re.sub(r' --steps[ =][0-9]+', '', words)} {shlex.join(more)}" if more else words
