"""What a checkpoint is on disk.

    checkpoints/200/arrays/         Orbax; one entry per array, named by its dotted path ("master.embed.w_embed")
    checkpoints/200/MANIFEST.json   step, tokens seen, config, versions, arrays (shape, dtype), files (bytes, sha256);
                                    sha256 of all that
    checkpoints/300.partial/        a save in progress, or one that was interrupted; never read

A directory gets its final name by one rename after everything in it, the manifest last, has been written. So a name
without `.partial` means complete, and anything missing behind such a name is damage, not an interrupted save.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

FORMAT = 2
ARRAYS = "arrays"
MANIFEST = "MANIFEST.json"
PARTIAL = ".partial"


def flat_names(tree: Any) -> dict[str, Any]:
    """Leaves of nested dicts by dotted name, in the order of jax.tree.leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def describe_arrays(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each array, as the manifest lists them."""
    return {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in flat.items()}


def describe_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file below a directory, by relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(_sha256, files)
        return {
            str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(files, digests, strict=True)
        }


def damage(directory: Path, listed: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the files below a directory, one sentence for each; `listed` is what `describe_files` once said of them."""
    found = describe_files(directory)
    problems = [f"file {ARRAYS}/{name} is a symbolic link, of which a checkpoint has none" for name in _links(directory)]
    for name, expected in listed.items():
        if name not in found:
            problems.append(f"file {ARRAYS}/{name} is missing")
        elif found[name]["bytes"] != expected["bytes"]:
            problems.append(f"file {ARRAYS}/{name} has {found[name]['bytes']} bytes instead of {expected['bytes']}")
        elif found[name] != expected:
            problems.append(f"file {ARRAYS}/{name} has changed since it was written (its SHA-256 differs)")
    return problems


def seal(fields: dict[str, Any]) -> dict[str, Any]:
    """A manifest's fields with their SHA-256, taken over JSON that does not depend on order or white space."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return fields | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint."""
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("moejax", "jax", "jaxlib", "orbax-checkpoint")
    }


def _links(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_symlink())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
