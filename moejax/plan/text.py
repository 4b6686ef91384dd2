"""A plan as text for the console."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from moejax.config import SYSTEM_REFERENCE
from moejax.plan.compiled import Compiled
from moejax.plan.estimate import ARGUMENTS, ERROR, LEFT_OUT, PEAK, PREALLOCATED, USABLE, merged, usable_bytes
from moejax.plan.fit import MAX_GPUS
from moejax.plan.plan import Plan

_MIB, _GIB = 2**20, 2**30


def lines(plan: Plan) -> Iterator[str]:
    """The whole plan, line by line."""
    figures, config = plan.estimate, plan.config
    mesh = config.mesh
    yield f"{config.name} on {mesh.num_devices:,} x {figures.gpu.name}: {mesh.words}, recompute {config.model.recompute}"
    if config.model.is_system_reference:
        yield f"  {SYSTEM_REFERENCE}"
    yield from (f"  {name} cannot run yet: {instead}" for name, instead in figures.pending.items())
    yield ""
    yield (
        f"model      {short(figures.parameters)} parameters, {short(figures.active_parameters)} of them for one token; "
        f"{figures.flops_per_token / 1e9:.4g} GFLOPs a token"
    )
    yield (
        f"step       {figures.tokens:,} tokens in {config.microbatches:,} microbatches of "
        f"{config.microbatch_size // mesh.data_ranks} x {config.data.seq_len:,} a GPU"
    )
    peak = PEAK[config.model.dtype][0]
    yield f"at least   {seconds(figures.compute_s)} of arithmetic at the {peak} peak, {seconds(figures.send_s)} of traffic at full rate"
    if mesh.pp > 1:
        yield f"           a pipeline rank waits {figures.bubble:.1%} of a step"
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _traffic(plan)
    yield ""
    yield "kernels"
    yield from (f"  {name}: {reason}" for name, reason in figures.choices.items())
    if plan.compiled:
        yield from _program(plan.compiled)
    yield ""
    yield from verdict(plan)


def verdict(plan: Plan) -> Iterator[str]:
    """Whether it fits, by how much, and what else would."""
    gpu, by = plan.estimate.gpu, "XLA" if plan.compiled else "arithmetic"
    usable = f"{gib(usable_bytes(gpu))} GiB ({USABLE} of the {gib(gpu.memory_bytes)} of one {gpu.name})"
    if plan.fits:
        yield f"fits: {gib(plan.total_bytes)} GiB by {by} leave {gib(plan.margin_bytes)} of {usable}"
    else:
        yield f"does not fit: {gib(plan.total_bytes)} GiB by {by} are {gib(-plan.margin_bytes)} more than {usable}"
    yield f"  not in these figures: {LEFT_OUT}"
    if plan.fits:
        if plan.is_narrow:
            yield f"  narrowly: arithmetic can be {ERROR:.0%} low in what a step holds beside its arguments; --compile says more"
        if plan.total_bytes > PREALLOCATED * gpu.memory_bytes:
            yield f"  JAX hands out {PREALLOCATED} of a GPU's memory by default: train with XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}"
        return
    if not plan.suggestions:
        yield (
            f"  no recompute, microbatches, mesh of up to {MAX_GPUS:,} GPUs, or half as long sequences (and half of that) that were tried "
            "make it fit; take fewer or smaller experts, or a larger GPU"
        )
        return
    yield "  nearest settings that fit:"
    width = max(len(suggestion.words) for suggestion in plan.suggestions)
    for suggestion in plan.suggestions:
        gpus = suggestion.config.mesh.num_devices
        more = f", on {gpus:,} GPUs" if gpus != plan.config.mesh.num_devices else ""
        left = gib(usable_bytes(gpu) - suggestion.total_bytes)
        yield f"    {suggestion.words:<{width}}  {gib(suggestion.total_bytes)} GiB, {left} left{more}"


def _memory(plan: Plan) -> Iterator[str]:
    """Arithmetic beside XLA, part by part."""
    figures, compiled = plan.estimate, plan.compiled
    given = sum(figures.memory[name] for name in ARGUMENTS)
    own = figures.total_bytes - given
    xla = compiled.roles if compiled else {}
    rows = [("memory of one GPU, GiB", "arithmetic", "XLA")]
    rows += [(f"  {name}", gib(size), "") for name, size in merged({name: figures.memory[name] for name in ARGUMENTS}).items()]
    if compiled:
        rows.append(("  what the step is given", gib(given), gib(compiled.argument_bytes)))
    rows += [(f"  {name}", gib(size), gib(xla.get(name, 0))) for name, size in figures.memory.items() if name not in ARGUMENTS]
    if compiled:
        rows.append(("  packing", "", gib(compiled.packing_bytes)))
        rows.append(("  what it holds beside that", gib(own), f"{gib(compiled.arena_bytes)}  {_difference(own, compiled.arena_bytes)}"))
    total = f"{gib(compiled.total_bytes)}  {_difference(figures.total_bytes, compiled.total_bytes)}" if compiled else ""
    rows.append(("  total", gib(figures.total_bytes), total))
    yield from _aligned(rows if compiled else [row[:2] for row in rows])
    if figures.dispatch_bytes:
        yield f"  (of the working set, a layer's buffer for routed rows: {gib(figures.dispatch_bytes)})"
    if figures.host_bytes:
        yield f"  (and {gib(figures.host_bytes)} in pinned host memory)"


def _difference(arithmetic: float, xla: float) -> str:
    return f"({(arithmetic - xla) / xla:+.1%} by arithmetic)"


def _traffic(plan: Plan) -> Iterator[str]:
    """Each kind of collective: what it carries in a step, which links that takes, and XLA's count of the same."""
    found = {tuple(line[:3]): line for line in plan.compiled.traffic} if plan.compiled else {}
    title = ("traffic of a step, GiB", "axes", "dtype", "runs", "payload", "NVLink", "network", "at least")
    rows: list[Sequence[str]] = [(*title, *(("XLA",) if plan.compiled else ()))]
    for link in plan.estimate.links:
        line, least = link.line, seconds(link.seconds(plan.estimate.gpu))
        sizes = map(gib, (line.payload, link.nvlink, link.network))
        row = (f"  {line.kind}", ",".join(line.axes), line.dtype, f"{line.times:,}", *sizes, least)
        xla = found.pop(tuple(line[:3]), None)
        same = xla is not None and xla.payload == line.payload
        note = "the same" if same else f"{gib(xla.payload)}" if xla else "none"
        rows.append((*row, *((note,) if plan.compiled else ())))
    large = [line for line in found.values() if line.payload >= _MIB]
    for line in large:
        rows.append((f"  {line.kind}", ",".join(line.axes), line.dtype, f"{line.times:,}", "not counted", "", "", "", gib(line.payload)))
    yield from _aligned(rows, left=(0, 1, 2))
    for link in plan.estimate.links:
        if 0 < link.crossing < plan.config.mesh.num_devices:
            who = f"{link.crossing:,} of {plan.config.mesh.num_devices:,} GPUs send over the network"
            yield f"  {link.line.kind} over {','.join(link.line.axes)}: {who}; each link counts for the GPU that sends most over it"
    if plan.compiled:
        small = [line for line in found.values() if line.payload < _MIB]
        count, rest = sum(line.times for line in small), sum(line.payload for line in small)
        yield f"  XLA has {count:,} more collectives below 1 MiB a step (metrics, norms), {rest / _MIB:.2f} MiB together"


def _program(compiled: Compiled) -> Iterator[str]:
    yield "  in one step: " + ", ".join(f"{times:,} x {name}" for name, times in compiled.kernels.items())
    yield f"  {compiled.conditionals} conditionals, {compiled.host_transfers} host transfers"
    yield ""
    yield f"compiled   lowered in {compiled.lower_s:.0f} s, compiled in {compiled.compile_s:.0f} s"
    yield "  buffers above 1 % of what the step holds, GiB"
    counts = Counter((array, part, _place(source), size) for size, array, part, source in compiled.buffers)
    rows = [(f"  {count} x", gib(size), array, part, place) for (array, part, place, size), count in counts.items()]
    yield from _aligned(rows, left=(0, 2, 3, 4))


def _place(op_name: str) -> str:
    """Where in the model a buffer is filled, without the words that loops and transformations add."""
    steps = re.sub(r"\b(while/body|eval_jaxpr|microbatches|checkpoint|rematted_computation)\b/?", "", op_name).split("/")
    return "/".join(dict.fromkeys(step for step in steps if step and not step.startswith("jit(") and step != "dynamic_update_slice"))


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    """Rows as lines with columns of one width, those of `left` flush left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = (f"{cell:<{width}}" if i in left else f"{cell:>{width}}" for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()


def gib(size: float) -> str:
    return f"{size / _GIB:,.2f}"


def short(count: float) -> str:
    """A count of parameters as people write it."""
    return f"{count / 1e9:,.2f}B" if count >= 1e8 else f"{count / 1e6:.2f}M"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value * 1e3:,.0f} ms" if value < 1 else f"{value:.2f} s"
