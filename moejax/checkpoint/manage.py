"""Makes checkpoints fewer, or one out of several."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.checkpoint.inspect import read_arrays
from moejax.checkpoint.restore import committed_steps, read_manifest
from moejax.checkpoint.save import Writer, delete, doomed
from moejax.errors import CheckpointError

_AVERAGED = "master."


def average(
    sources: Sequence[tuple[Path, int]], out: Path, *, decay: float | None = None, say: Callable[[str], None] = lambda text: None
) -> int:
    """Write a checkpoint into the new directory `out` whose weights are the average of those of several, and return its step.

    Moments and everything else are left out: it can be evaluated and generate, and training cannot go on from it.

    Args:
        sources: directories of checkpoints and steps, oldest first. The step, config and router state of the last one are taken.
        decay: weight of a checkpoint over that of the next one. None: all weigh the same.

    Raises:
        CheckpointError: if one cannot be read, or they hold different arrays.
    """
    manifests = [read_manifest(*source) for source in sources]
    newest = manifests[-1]
    names = [name for name in newest["arrays"] if name.startswith(_AVERAGED)]
    for source, manifest in zip(sources, manifests, strict=True):
        wrong = [name for name in names if manifest["arrays"].get(name) != newest["arrays"][name]]
        if wrong:
            raise CheckpointError(
                f"checkpoint {source[0] / str(source[1])} has another {wrong[0]} than {sources[-1][0] / str(sources[-1][1])} "
                f"({len(wrong)} arrays differ in shape); only checkpoints of one model have an average"
            )
    weights = np.array([(decay or 1.0) ** (len(sources) - 1 - i) for i in range(len(sources))])
    weights /= weights.sum()
    tree: dict[str, Any] = {}
    for done, parts in enumerate(zip(*(read_arrays(*source, names) for source in sources), strict=True), start=1):
        name, last = parts[-1]
        say(f"array {done} of {len(names)}: {name}")
        total = sum(weight * part.astype(np.float64) for weight, (_, part) in zip(weights, parts, strict=True))
        _put(tree, name, np.asarray(total, last.dtype))
    rest = [name for name in newest["arrays"] if name.startswith("router.") or name == "step"]
    for name, array in read_arrays(*sources[-1], rest):
        _put(tree, name, array)
    about = {name: newest[name] for name in ("tokens_seen", "samples_seen", "config") if name in newest}
    about["average"] = {"of": [str(path / str(step)) for path, step in sources], "weights": [float(w) for w in weights]}
    writer = Writer(out, keep=1)
    writer.save(newest["step"], tree | {"router": tree.get("router", {})}, about)
    writer.wait()
    writer.close()
    return newest["step"]


def prune(directory: Path, *, keep: int, keep_every: int | None, is_dry: bool, say: Callable[[str], None]) -> list[int]:
    """Delete what `doomed` names, oldest first, unless it is dry; return those steps."""
    steps = doomed(committed_steps(directory), keep=keep, keep_every=keep_every)
    for step in steps:
        say(f"{'would delete' if is_dry else 'deleting'} {directory / str(step)}")
        if not is_dry:
            delete(directory, step)
    return steps


def _put(tree: dict[str, Any], name: str, value: np.ndarray) -> None:
    *folders, last = name.split(".")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[last] = value
