"""Reads checkpoints onto any mesh, after making sure that they are whole and fit."""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from moejax.checkpoint import format as fmt
from moejax.errors import CheckpointError

_LISTED = 12  # lines of a message


def committed_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, oldest first; empty if the directory does not exist."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def read_manifest(directory: Path, step: int) -> dict[str, Any]:
    """Everything a checkpoint says about itself.

    What passes the checksum is what was written, so its fields need no checks of their own.

    Raises:
        CheckpointError: if it is missing, damaged, or of another format.
    """
    path = directory / str(step)
    if not path.is_dir():
        have = ", ".join(map(str, committed_steps(directory))) or "none"
        raise CheckpointError(f"there is no checkpoint {step} in {directory} (found: {have}); name one that exists, or train first")
    try:
        manifest = json.loads((path / fmt.MANIFEST).read_text())
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(directory, step, f"{fmt.MANIFEST} is missing or not readable ({type(error).__name__})") from error
    if version != fmt.FORMAT:
        versions = manifest.get("versions")
        writer = versions.get("moejax", "unknown") if isinstance(versions, dict) else "unknown"
        raise CheckpointError(
            f"checkpoint {path} has format {version}, this moejax reads format {fmt.FORMAT}; use the version that wrote it: moejax {writer}"
        )
    if manifest != fmt.seal({name: value for name, value in manifest.items() if name != "sha256"}):
        raise _damaged(directory, step, f"{fmt.MANIFEST} has changed since it was written (its SHA-256 differs)")
    if manifest["step"] != step:
        raise _damaged(directory, step, f"{fmt.MANIFEST} is that of checkpoint {manifest['step']}")
    return manifest


def restore(directory: Path, step: int, abstract: Any) -> Any:
    """The arrays of a checkpoint, in the tree, dtypes and shardings of `abstract` (nested dicts of jax.ShapeDtypeStruct).

    The mesh need not be the one that wrote the checkpoint. `abstract` may ask for a part of what is stored, such as the
    masters alone. Every file is checked against the manifest before anything is read.

    Raises:
        CheckpointError: missing, damaged, of another format, without a wanted array, or with one of another shape or dtype.
    """
    manifest = read_manifest(directory, step)
    wanted = fmt.flat_names(abstract)
    _check_arrays(directory / str(step), manifest["arrays"], fmt.describe_arrays(wanted))
    _check_files(directory, step, manifest["files"])
    path = (directory / str(step) / fmt.ARRAYS).absolute()
    arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            flat = reader.restore(path, args=arguments)
    except Exception as error:  # Orbax raises bare Exceptions for files it cannot read
        raise _damaged(directory, step, f"Orbax could not read it ({type(error).__name__}: {str(error)[:200]})") from error
    return jax.tree.unflatten(jax.tree.structure(abstract), [flat[name] for name in wanted])


def _check_arrays(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model with one sentence, and a line for each array that differs."""
    way_out = "use the config that wrote it (in its MANIFEST.json), or another --run-dir"
    missing = [name for name in wanted if name not in stored]
    wrong = [name for name, leaf in wanted.items() if name in stored and stored[name] != leaf]
    if missing:
        sentence = f"checkpoint {path} has no array {missing[0]}; it belongs to another model or optimizer: {way_out}"
    elif wrong:
        have, want = (form(arrays[wrong[0]]) for arrays in (stored, wanted))
        sentence = f"checkpoint {path} holds {wrong[0]} as {have}, the config asks for {want}; {way_out}"
    else:
        return
    lines = [f"{name}: nothing -> {form(wanted[name])}" for name in missing]
    lines += [f"{name}: {form(stored[name])} -> {form(wanted[name])}" for name in wrong]
    if len(lines) > 1:
        more = [f"and {len(lines) - _LISTED} more"] * (len(lines) > _LISTED)
        sentence += "\narrays that differ (there -> here):" + "".join(f"\n  {line}" for line in lines[:_LISTED] + more)
    raise CheckpointError(sentence)


def form(array: dict[str, Any]) -> str:
    """Dtype and shape of an array in a manifest, as people read them."""
    return f"{array['dtype']}{array['shape']}"


def _check_files(directory: Path, step: int, listed: dict[str, Any]) -> None:
    if problems := fmt.damage(directory / str(step) / fmt.ARRAYS, listed):
        raise _damaged(directory, step, f"{problems[0]}{_and_more(problems)}")


def _damaged(directory: Path, step: int, reason: str) -> CheckpointError:
    older = [other for other in committed_steps(directory) if other < step]
    way_out = (
        f"to go on from checkpoint {older[-1]} instead, delete {directory / str(step)}"
        if older
        else "there is no older one; train in another --run-dir"
    )
    return CheckpointError(f"checkpoint {directory / str(step)} cannot be read: {reason}; {way_out}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
