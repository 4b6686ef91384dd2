"""Checkpoints: float32 arrays by name, written in the background, read onto any mesh. The only importer of Orbax."""

from moejax.checkpoint.inspect import branches, broken, compare
from moejax.checkpoint.manage import average, prune
from moejax.checkpoint.restore import committed_steps, read_manifest, restore
from moejax.checkpoint.save import Writer

__all__ = [
    "Writer",
    "average",
    "branches",
    "broken",
    "committed_steps",
    "compare",
    "prune",
    "read_manifest",
    "restore",
]
