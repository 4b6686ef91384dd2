"""Checkpoints: float32 arrays by name, written in the background, read onto any mesh. The only importer of Orbax."""

from moejax.checkpoint.restore import committed_steps, read_manifest, restore
from moejax.checkpoint.save import Writer

__all__ = ["Writer", "committed_steps", "read_manifest", "restore"]
