"""Writes the table of reference points into configs/README.md, from the configs and their plans; a test sees that it is up to date.

python tools/reference_table.py             # write it
python tools/reference_table.py --check     # exit code 1 if the README has another one
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from moejax.config import SYSTEM_REFERENCE, TrainConfig, load_config
from moejax.plan.estimate import Estimate, estimate, usable_bytes
from moejax.plan.gpus import find_gpu
from moejax.plan.text import gib, short

README = Path(__file__).parents[1] / "configs" / "README.md"
BEGIN, END = "<!-- reference table: begin -->", "<!-- reference table: end -->"
GPU = "b300"
SOURCE = "https://huggingface.co/blog/allenai/olmocore3"

_LEARNED = ("--model.moe.router.assignment", "learned")
_LEARNED_TINY = (*_LEARNED, "--model.moe.router.balance-loss-weight", "0.01")


@dataclass(frozen=True)
class Point:
    """A config with settings changed. published: what is known of runs of it elsewhere."""

    name: str
    config: str
    words: tuple[str, ...] = ()
    published: str = ""


def _eight(num_experts: int, published: str = "") -> Point:
    words = () if num_experts == 64 else ("--model.moe.num-experts", str(num_experts))
    return Point(f"Eight layers, {num_experts}E", "eight_layers", words, published)


POINTS = (
    _eight(8),
    _eight(32),
    _eight(48),
    _eight(64),
    _eight(128, "52,000 tokens/s a GPU (19,400 with fully sharded weights); less than 5 % below 8E"),
    Point("Tiny-64E", "tiny_64e"),
    Point("Tiny-64E, learned", "tiny_64e", _LEARNED_TINY),
    Point("Tiny-64E, learned, EP8", "tiny_64e", (*_LEARNED_TINY, "--mesh.dp", "2", "--mesh.ep", "8")),
    Point("Small-64E, 24Mi", "small_64e"),
    Point("Small-64E, 24Mi, learned", "small_64e", _LEARNED),
    Point("Small-64E, 16Mi", "small_64e", ("--batch-size", "2048", "--microbatches", "8")),
    Point("Medium-64E", "medium_64e"),
    Point("Medium-96E", "medium_96e"),
    Point("Medium-128E", "medium_128e"),
    Point("Large-128E, PP4", "large_128e"),
    Point("Large-128E, PP8", "large_128e", ("--mesh.pp", "8", "--mesh.dp", "8", "--batch-size", "3072", "--microbatches", "48")),
    Point("Ultra-128E", "ultra_128e", (), "858 TFLOP/s a GPU at most"),
    Point("Ultra-256E", "ultra_256e", (), "a short test that it runs"),
)


def table() -> str:
    """The table and what has to be said with it, as Markdown."""
    rows = [
        (
            "point",
            "active / total",
            "GPUs",
            "mesh",
            "routing",
            "precision, recompute",
            "published",
            f"planned for one {GPU}, GiB",
            "command",
        ),
        ("---", "---:", "---:", "---", "---", "---", "---", "---:", "---"),
        *(_row(point) for point in POINTS),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    notes = f"""\
Parameters are counted from the config and equal the published counts. Published speeds are from [Ai2's announcement]({SOURCE}), measured
there with another program. Planned memory is arithmetic, within 10 % of what XLA says for the eight-layer family on 8 GPUs;
{usable_bytes_words()}. Of the points with stages (pp), Ultra-128E was compiled at its shape, all
1,200.48B parameters in bfloat16 for 512 B300 (`--model.precision plain --compile`): XLA says 182.44 GiB a GPU, arithmetic 181.12.

Points with random or uniform routing: {SYSTEM_REFERENCE}.
That holds for the published speeds too."""
    return "\n".join([*lines, "", notes])


def usable_bytes_words() -> str:
    return f"up to {gib(usable_bytes(find_gpu(GPU)))} GiB may be filled"


def config_of(point: Point) -> TrainConfig:
    return load_config(point.config, point.words)


def updated(text: str) -> str:
    """A README with the table between its two marks made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _row(point: Point) -> tuple[str, ...]:
    config = config_of(point)
    figures = estimate(config, GPU)
    mesh, model = config.mesh, config.model
    assert model.moe is not None
    stages = f"pp {mesh.pp} x {mesh.virtual_stages}, " if mesh.pp > 1 else ""
    precision = "MXFP8" if model.precision == "mxfp8" else "bf16"
    command = " ".join(("moejax plan", point.config, "--gpu", GPU, *point.words))
    return (
        point.name,
        f"{short(figures.active_parameters)} / {short(figures.parameters)}",
        str(mesh.num_devices),
        f"{stages}dp {mesh.dp}, ep {mesh.ep}",
        model.moe.router.assignment,
        f"{precision}, {model.recompute}",
        point.published,
        _planned(figures),
        f"`{command}`",
    )


def _planned(figures: Estimate) -> str:
    fits = figures.total_bytes <= usable_bytes(figures.gpu)
    return f"{figures.total_bytes / 2**30:.0f}" + ("" if fits else ", does not fit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the README is up to date")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = updated(text)
    if args.check and new != text:
        parser.exit(1, f"{README} has another table of reference points; run python tools/reference_table.py\n")
    if not args.check:
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
