"""Checkpoints: round trips to the bit across meshes, atomic saves, damage that is refused with its reason."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moejax.checkpoint import Writer, committed_steps, read_manifest, restore
from moejax.checkpoint import format as fmt
from moejax.errors import CheckpointError


def _mesh(dp: int, ep: int) -> jax.sharding.Mesh:
    return jax.make_mesh((dp, ep), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: dp * ep])


def _abstract(mesh: jax.sharding.Mesh, spec: PartitionSpec) -> dict:
    def leaf(shape, dtype, *, split: bool) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec if split else PartitionSpec()))

    return {
        "master": {
            "embed": {"w_embed": leaf((16, 8), jnp.float32, split=True)},
            "head": {"w_head": leaf((8, 16), jnp.float32, split=True)},
        },
        "moments": {"mu": {"head": {"w_head": leaf((8, 16), jnp.float32, split=True)}}},
        "router": {},
        "step": leaf((), jnp.int32, split=False),
    }


def _concrete(abstract: dict, seed: int = 0) -> dict:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jax.device_put(random.integers(1, 10**6, a.shape).astype(a.dtype), a.sharding), abstract)


SPLIT = PartitionSpec(("dp", "ep"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict]:
    tree = _concrete(_abstract(_mesh(2, 4), SPLIT))
    writer = Writer(tmp_path, keep=3)
    for step in (1, 2):
        writer.save(step, tree, {"tokens_seen": 100 * step, "config": {"name": "x"}})
    writer.wait()
    writer.close()
    return tmp_path, tree


@pytest.fixture
def saved_manifest(tmp_path: Path) -> tuple[Path, dict]:
    """A checkpoint 2 without arrays, and the fields of its manifest."""
    listed = {"arrays": {"w": {"shape": [4], "dtype": "float32"}}, "files": {"w/0": {"bytes": 16, "sha256": "0" * 64}}}
    about = {"format": fmt.FORMAT, "step": 2, "tokens_seen": 200, "config": {"name": "x"}, "versions": fmt.versions()}
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / fmt.MANIFEST).write_text(json.dumps(fmt.seal(about | listed)))
    assert read_manifest(tmp_path, 2) == fmt.seal(about | listed)
    return tmp_path, fmt.seal(about | listed)


@pytest.mark.parametrize(("dp", "ep", "spec"), [(2, 4, SPLIT), (1, 1, SPLIT), (8, 1, SPLIT), (1, 2, PartitionSpec(None, "ep"))])
def test_a_checkpoint_comes_back_to_the_bit_on_any_mesh(saved, dp, ep, spec):
    directory, tree = saved
    abstract = _abstract(_mesh(dp, ep), spec)
    back = restore(directory, 2, abstract)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    jax.tree.map(lambda a, b: (a.dtype, a.sharding) == (b.dtype, b.sharding) or pytest.fail(f"{a} is not {b}"), back, abstract)


def test_a_part_of_a_checkpoint_can_be_read_alone(saved):
    directory, tree = saved
    back = restore(directory, 2, {"master": _abstract(_mesh(1, 1), SPLIT)["master"]})
    jax.tree.map(np.testing.assert_array_equal, back, {"master": tree["master"]})


def test_the_manifest_says_what_the_checkpoint_is(saved):
    manifest = read_manifest(saved[0], 2)
    assert (manifest["step"], manifest["tokens_seen"], manifest["config"]) == (2, 200, {"name": "x"})
    assert manifest["versions"]["jax"] == jax.__version__
    assert manifest["arrays"]["master.embed.w_embed"] == {"shape": [16, 8], "dtype": "float32"}


def test_donating_a_state_right_after_saving_it_changes_nothing_on_disk(tmp_path):
    sharding = NamedSharding(_mesh(8, 1), SPLIT)
    step = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1.0, tree), donate_argnums=0)
    state = {"w": jax.device_put(np.zeros((1024, 1024), np.float32), sharding)}
    writer = Writer(tmp_path, keep=5)
    for count in range(1, 6):
        state = step(state)
        writer.save(count, state, {})
        state = step(step(state))
        state = jax.tree.map(lambda a: a - 2.0, state)
    writer.wait()
    writer.close()
    for count in range(1, 6):
        back = restore(tmp_path, count, {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)})
        np.testing.assert_array_equal(back["w"], np.float32(count))


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    tree = _concrete(_abstract(_mesh(1, 1), SPLIT))
    writer = Writer(tmp_path, keep=2)
    for step in (1, 5, 10, 20):
        writer.save(step, tree, {})
    writer.wait()
    writer.close()
    assert committed_steps(tmp_path) == [10, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20"]


def test_every_so_many_stay_for_good(tmp_path):
    tree = _concrete(_abstract(_mesh(1, 1), SPLIT))
    writer = Writer(tmp_path, keep=1, keep_every=10)
    for step in (5, 10, 15, 20, 25):
        writer.save(step, tree, {})
    writer.wait()
    writer.close()
    assert committed_steps(tmp_path) == [10, 20, 25]


def test_a_save_that_cannot_fit_is_refused_before_anything_is_written(saved, monkeypatch):
    directory, tree = saved
    monkeypatch.setattr("moejax.checkpoint.save.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    writer = Writer(directory, keep=3)
    message = r"checkpoint 3 could not be written .* it needs 0\.000 GiB, and 0\.000 GiB are free; checkpoint 2 is intact; make room"
    with pytest.raises(CheckpointError, match=message):
        writer.save(3, tree, {})
    writer.close()
    assert committed_steps(directory) == [1, 2]


def test_a_link_out_of_the_directory_is_damage(saved, tmp_path_factory):
    directory, _ = saved
    file = _largest(directory / "2" / "arrays")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "stolen"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="is a symbolic link, of which a checkpoint has none"):
        restore(directory, 2, _abstract(_mesh(1, 1), SPLIT))


@pytest.mark.parametrize("name", ["../../1/MANIFEST.json", "/etc/hostname"])
def test_a_path_that_leaves_the_directory_is_never_followed(saved, name):
    directory, _ = saved
    path = directory / "2" / "MANIFEST.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    fields["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    path.write_text(json.dumps(fmt.seal(fields)))
    with pytest.raises(CheckpointError, match="is missing"):
        restore(directory, 2, _abstract(_mesh(1, 1), SPLIT))


def test_a_failed_background_save_is_reported_by_the_next_poll(tmp_path, monkeypatch):
    writer = Writer(tmp_path, keep=2)
    monkeypatch.setattr(
        "moejax.checkpoint.format.describe_files", lambda directory: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    writer.save(7, _concrete(_abstract(_mesh(1, 1), SPLIT)), {})
    while not writer.is_idle():
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=r"checkpoint 7 could not be written.*No space left on device.*make room"):
        writer.poll()
    writer.close()
    assert committed_steps(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_reported_at_once(tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    writer = Writer(tmp_path / "checkpoints", keep=2)
    with pytest.raises(CheckpointError, match="checkpoint 7 could not be written"):
        writer.save(7, _concrete(_abstract(_mesh(1, 1), SPLIT)), {})
    writer.close()


def _largest(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda step: _truncate(_largest(step / "arrays")), r"cannot be read: file arrays/.* bytes instead of"),
        (lambda step: _flip(_largest(step / "arrays")), "has changed since it was written"),
        (lambda step: _largest(step / "arrays").unlink(), "is missing"),
        (lambda step: shutil.rmtree(step / "arrays"), "is missing"),
        (lambda step: (step / "MANIFEST.json").unlink(), "MANIFEST.json is missing or not readable"),
        (lambda step: _truncate(step / "MANIFEST.json"), "MANIFEST.json is missing or not readable"),
        (lambda step: _edit(step / "MANIFEST.json", format=99), "has format 99, this moejax reads format 2; .*: moejax [0-9]"),
        (
            lambda step: _edit(step / "MANIFEST.json", format=99, versions=3),
            "has format 99, this moejax reads format 2; .*: moejax unknown",
        ),
    ],
    ids=["truncated", "flipped bit", "missing file", "missing arrays", "missing manifest", "truncated manifest", "newer format", "other"],
)
def test_damage_is_refused_with_its_reason(saved, damage, message):
    directory, _ = saved
    damage(directory / "2")
    with pytest.raises(CheckpointError, match=message):
        restore(directory, 2, _abstract(_mesh(1, 1), SPLIT))
    jax.block_until_ready(restore(directory, 1, _abstract(_mesh(1, 1), SPLIT)))


WRITTEN = ("step", "tokens_seen", "config", "versions", "arrays", "files")


@pytest.mark.parametrize("wrong", [None, "x", 3, [], {}, {"a": {}}], ids=repr)
@pytest.mark.parametrize("field", [*WRITTEN, "sha256"])
def test_a_field_of_the_manifest_with_another_value_is_damage(saved_manifest, field, wrong):
    directory, fields = saved_manifest
    (directory / "2" / "MANIFEST.json").write_text(json.dumps(fields | {field: wrong}))
    with pytest.raises(CheckpointError, match=r"checkpoint .*2 cannot be read: MANIFEST.json has changed since it was written"):
        read_manifest(directory, 2)


@pytest.mark.parametrize("field", [*WRITTEN, "sha256"])
def test_a_field_that_the_manifest_lacks_is_damage(saved_manifest, field):
    directory, fields = saved_manifest
    (directory / "2" / "MANIFEST.json").write_text(json.dumps({name: value for name, value in fields.items() if name != field}))
    with pytest.raises(CheckpointError, match=r"checkpoint .*2 cannot be read: MANIFEST.json has changed since it was written"):
        read_manifest(directory, 2)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '"format"', "null"])
def test_a_manifest_that_is_no_object_is_damage(saved_manifest, text):
    directory, _ = saved_manifest
    (directory / "2" / "MANIFEST.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot be read: MANIFEST.json is missing or not readable"):
        read_manifest(directory, 2)


def test_a_digit_that_flips_in_the_manifest_is_damage(saved_manifest):
    directory, _ = saved_manifest
    path = directory / "2" / "MANIFEST.json"
    path.write_text(path.read_text().replace('"tokens_seen": 200', '"tokens_seen": 300'))
    with pytest.raises(CheckpointError, match=r"MANIFEST.json has changed since it was written \(its SHA-256 differs\)"):
        read_manifest(directory, 2)


def test_a_checkpoint_under_another_number_is_refused(saved_manifest):
    directory, _ = saved_manifest
    (directory / "2").rename(directory / "7")
    with pytest.raises(CheckpointError, match=r"checkpoint .*7 cannot be read: MANIFEST.json is that of checkpoint 2"):
        read_manifest(directory, 7)


def test_a_file_is_no_checkpoint(saved_manifest):
    (saved_manifest[0] / "9").write_text("")
    assert committed_steps(saved_manifest[0]) == [2]


def test_damage_names_the_older_checkpoint_as_the_way_out(saved):
    _truncate(_largest(saved[0] / "2" / "arrays"))
    with pytest.raises(CheckpointError, match=r"to go on from checkpoint 1 instead, delete .*2$"):
        restore(saved[0], 2, _abstract(_mesh(1, 1), SPLIT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["master"].update(extra=t["step"]), "has no array master.extra"),
        (
            lambda t: t["master"].update(embed={"w_embed": jax.ShapeDtypeStruct((17, 8), jnp.float32, sharding=t["step"].sharding)}),
            r"holds master.embed.w_embed as float32\[16, 8\], the config asks for float32\[17, 8\]",
        ),
        (lambda t: t.update(step=jax.ShapeDtypeStruct((), jnp.float32, sharding=t["step"].sharding)), r"holds step as int32\[\]"),
    ],
    ids=["missing array", "wrong shape", "wrong dtype"],
)
def test_arrays_that_do_not_fit_are_refused(saved, change, message):
    abstract = _abstract(_mesh(1, 1), SPLIT)
    change(abstract)
    with pytest.raises(CheckpointError, match=message):
        restore(saved[0], 2, abstract)


def test_every_array_that_does_not_fit_has_a_line(saved):
    abstract = _abstract(_mesh(1, 1), SPLIT)
    abstract["master"]["extra"] = abstract["step"]
    abstract["master"]["embed"]["w_embed"] = jax.ShapeDtypeStruct((17, 8), jnp.float32, sharding=abstract["step"].sharding)
    with pytest.raises(CheckpointError) as refusal:
        restore(saved[0], 2, abstract)
    listing = str(refusal.value).partition("arrays that differ (there -> here):\n")[2].splitlines()
    assert listing == ["  master.extra: nothing -> int32[]", "  master.embed.w_embed: float32[16, 8] -> float32[17, 8]"]


def test_a_step_that_does_not_exist_is_refused_with_those_that_do(saved):
    with pytest.raises(CheckpointError, match=r"no checkpoint 3 in .* \(found: 1, 2\)"):
        restore(saved[0], 3, _abstract(_mesh(1, 1), SPLIT))


KILLED = """
    import sys, time
    from pathlib import Path
    import jax.numpy as jnp
    import moejax.checkpoint.format as fmt
    from moejax.checkpoint import Writer
    writer = Writer(Path(sys.argv[1]), keep=1)
    writer.save(1, {"w": jnp.ones((64, 64))}, {})
    writer.wait()
    def hang(directory):
        print("saving", flush=True)
        time.sleep(600)
    fmt.describe_files = hang
    writer.save(2, {"w": jnp.full((64, 64), 2.0)}, {})
    time.sleep(600)
"""


def test_kill_9_in_the_middle_of_a_save_leaves_the_previous_checkpoint(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.partial"]
    abstract = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))}
    np.testing.assert_array_equal(restore(tmp_path, 1, abstract)["w"], 1.0)
    Writer(tmp_path, keep=1).close()
    assert committed_steps(tmp_path) == [1]
    assert not (tmp_path / "2.partial").exists()
