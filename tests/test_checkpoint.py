"""Checkpoints are whole or not there, damage is found and named, a folder has one owner."""

import errno
import json
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringtide.models import BadInput, checkpoint

STATE = {"w": jnp.arange(30000, dtype=jnp.float32), "opt": {"count": jnp.int32(7)}}
LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


def state(step):
    return jax.tree.map(lambda x: x + step, STATE)


def restored(folder):
    warnings = []
    step, tree = checkpoint.restore(folder, LIKE, warnings.append)
    jax.tree.map(np.testing.assert_array_equal, tree, state(step))
    return step, warnings


def big_file(folder, step):
    return max((folder / f"step-{step:08d}" / "state").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def folder(tmp_path):
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, step, state(step))
    return tmp_path


def test_the_last_three_are_kept(folder):
    assert checkpoint.steps(folder) == [20, 30, 40]
    assert restored(folder) == (40, [])
    assert not list(folder.glob(".*"))


def test_none_at_all(tmp_path):
    assert checkpoint.restore(tmp_path / "none", LIKE) is None


@pytest.mark.parametrize("damage", [truncate, flip, lambda path: path.unlink()])
def test_a_damaged_one_is_named_and_the_one_before_is_used(folder, damage):
    damage(big_file(folder, 40))
    truncate(folder / "step-00000030" / "manifest.json")
    step, warnings = restored(folder)
    assert step == 20
    assert "step-00000040 is damaged (state/" in warnings[0]
    assert "step-00000030 is damaged (manifest.json is not readable)" in warnings[1]
    assert {p.name for p in folder.glob("damaged-*")} == {"damaged-step-00000030", "damaged-step-00000040"}
    checkpoint.save(folder, 30, state(30))  # training comes by again
    assert restored(folder) == (30, [])
    assert not list(folder.glob("damaged-*"))


def test_all_damaged_is_an_error_each_time_and_changes_nothing(folder):
    for step in checkpoint.steps(folder):
        flip(big_file(folder, step))
    before = sorted(folder.rglob("*"))
    for _ in range(2):
        with pytest.raises(BadInput, match=r"every checkpoint in .* is damaged"):
            checkpoint.restore(folder, LIKE, lambda line: None)
        assert sorted(folder.rglob("*")) == before
    for step in checkpoint.steps(folder):  # what is set aside was damaged, too
        (folder / f"step-{step:08d}").rename(folder / f"damaged-step-{step:08d}")
    with pytest.raises(BadInput, match=r"every checkpoint in .* is damaged"):
        checkpoint.restore(folder, LIKE)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_what_cannot_be_read_is_not_damaged(folder, monkeypatch, code):
    def fails(*_):
        raise OSError(code, os.strerror(code))

    for name in ("_hash", "_hashes"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, fails)
            with pytest.raises(BadInput, match=rf"step-00000040 cannot be read \(.*{os.strerror(code)}"):
                checkpoint.restore(folder, LIKE)
    assert restored(folder) == (40, [])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m | {"step": 30}, "manifest.json is that of step 30"),
        (lambda m: m | {"files": []}, "is not in the manifest"),
        (lambda m: [m], "manifest.json is not readable"),
    ],
)
def test_a_manifest_is_that_of_its_folder(folder, spoil, message):
    manifest = folder / "step-00000040" / "manifest.json"
    manifest.write_text(json.dumps(spoil(json.loads(manifest.read_text()))))
    step, warnings = restored(folder)
    assert step == 30
    assert message in warnings[0]


def test_a_manifest_of_nothing_is_damaged(folder):
    shutil.rmtree(folder / "step-00000040" / "state")
    (folder / "step-00000040" / "manifest.json").write_text('{"step": 40, "files": {}}')
    step, warnings = restored(folder)
    assert step == 30
    assert "state is missing" in warnings[0]


def test_other_names_are_no_checkpoints(folder):
    for name in ("step-00000002.bak", "step-2", "step-", "step-x"):
        (folder / name).mkdir()
    assert restored(folder) == (40, [])


def test_another_model_is_one_line(folder):
    with pytest.raises(BadInput, match=r"step-00000040 does not fit its run.json"):
        checkpoint.restore(folder, LIKE | {"more": LIKE["w"]})


def test_what_a_kill_left_behind_is_swept(folder):
    (folder / ".saving-00000050" / "state").mkdir(parents=True)
    assert restored(folder) == (40, [])
    assert not list(folder.glob(".saving-*"))


def test_a_full_disk_is_one_line_and_leaves_the_others(folder, capfd):
    noise = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(BadInput) as caught:
            checkpoint.save(folder, 50, {"w": jnp.asarray(noise)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = str(caught.value)
    assert "checkpoint 50 could not be saved" in message
    assert "(File too large); checkpoint 40 and those before are intact" in message
    assert "\n" not in message
    assert "Traceback" not in capfd.readouterr().err
    assert checkpoint.steps(folder) == [20, 30, 40]
    assert restored(folder) == (40, [])


def test_a_folder_has_one_owner(tmp_path):
    run = tmp_path / "run"
    with checkpoint.locked(run), pytest.raises(BadInput, match=r"run: in use by process \d+"), checkpoint.locked(run):
        pass
    with checkpoint.locked(run):
        pass


def test_metrics_go_on_after_the_checkpoint_without_gap_or_copy(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = checkpoint.Metrics(path, -1)
    for step in range(6):
        metrics.write({"step": step, "loss": 1 / (step + 3)})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    metrics = checkpoint.Metrics(path, 3)
    metrics.write({"step": 4, "loss": 1 / 7})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": step, "loss": 1 / (step + 3)} for step in range(5)
    ]


@pytest.mark.parametrize(
    ("bad", "missing"),
    [
        (b"\xff\xfe\n", ""),
        (b"[]\n", ""),
        (b'{"step": "3"}\n', ""),
        (b'{"step": 2, "loss": null}\n', ""),
        (b"[" * 100_000 + b"\n", ""),
        (b'{"step": 2, "lo#s": 0.5\n', "1 of the steps 0 to 4 are missing, the first is 2; "),
    ],
)
def test_damage_in_the_metrics_is_skipped_kept_and_said(tmp_path, bad, missing):
    path, warnings = tmp_path / "metrics.jsonl", []
    lines = [{"step": step, "loss": 0.5} for step in range(5) if not (missing and step == 2)]
    whole = [json.dumps(line).encode() + b"\n" for line in lines]
    path.write_bytes(b"".join([*whole[:2], bad, *whole[2:]]))
    before = path.read_bytes()
    assert checkpoint.Metrics(path, 4, warnings.append).lines == lines
    assert warnings == [f"{path}: {missing}it is damaged and kept as metrics.jsonl.damaged"]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == before
    assert path.read_bytes() == b"".join(whole)


def test_metrics_that_were_deleted_are_said_to_be_missing(tmp_path):
    warnings = []
    assert checkpoint.Metrics(tmp_path / "metrics.jsonl", 4, warnings.append).lines == []
    assert warnings == [f"{tmp_path / 'metrics.jsonl'}: 5 of the steps 0 to 4 are missing, the first is 0"]
