"""Checkpoints under real kills, full disks and damaged files; random states bit for bit; one rank, two, and another number."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from training.distributed.world import World
from training.engine import checkpoint_folder
from training.engine.checkpoints import Checkpoints
from training.engine.random_state import reseed, restore_rng, rng_state
from training.runtime.environment import read_environment

from tests.entrypoints.ranks import from_clean_forks, run_ranks

ALONE = World(0, 1, 0, torch.device("cpu"), "none", "test")


def state(step: int, size: int = 1000) -> dict:
    """A tree whose every tensor says the step."""
    weights = OrderedDict(weight=torch.full((size,), float(step)), scale=torch.tensor(0.1, dtype=torch.bfloat16))
    return {"model": weights, "optimizer": {0: [torch.arange(step), (step, 0.1 + 0.2, "adam", None, True)]}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path, said):
    """Makes the checkpoints of a new process in the test's folder."""
    return lambda world=ALONE, **options: Checkpoints(tmp_path / "kept", world, log=said.append, **options)


def test_what_is_saved_comes_back_as_it_was(checkpoints, said):
    own = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.tensor(1.5, dtype=torch.float64)}
    checkpoints().save(7, state(7), own)
    loaded = checkpoints().load()
    assert loaded.step == 7 and said == []
    assert torch.equal(loaded.shared["model"]["weight"], state(7)["model"]["weight"])
    assert loaded.shared["model"]["scale"].dtype == torch.bfloat16
    assert loaded.shared["optimizer"][0][1] == (7, 0.1 + 0.2, "adam", None, True)
    for name, value in own.items():
        assert torch.equal(loaded.own[name], value) and loaded.own[name].dtype == value.dtype


def test_a_step_is_written_once(checkpoints, tmp_path):
    """A job that is stopped at the step of its last checkpoint has that one already, and so has one that resumed from it."""
    kept = checkpoints()
    kept.save(7, state(7), {})
    manifest = tmp_path / "kept/step-00000007/manifest.json"
    written = manifest.stat().st_ino
    kept.save(7, state(7), {}, required=True)
    resumed = checkpoints()
    assert resumed.load().step == 7
    resumed.save(7, state(7), {}, required=True)
    assert manifest.stat().st_ino == written


def test_without_a_folder_nothing_is_saved_and_nothing_found(said):
    nowhere = Checkpoints(None, ALONE, log=said.append)
    nowhere.save(1, state(1), {}, required=True)
    assert nowhere.load() is None and not nowhere.enabled


def test_an_empty_folder_holds_no_checkpoint(checkpoints, said):
    assert checkpoints().load() is None and said == []


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_newest_stay(checkpoints, tmp_path, keep):
    kept = checkpoints(keep=keep)
    (tmp_path / "kept/teacher_cache").mkdir(parents=True)  # of somebody else
    for step in range(98, 103):
        kept.save(step, state(step), {})
    assert names(tmp_path / "kept") == [f"step-{step:08d}" for step in range(103 - keep, 103)] + ["teacher_cache"]


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reported"),
    [
        ("shared.pt", flipped, "shared.pt: checksum"),
        ("own.pt", flipped, "own.pt: checksum"),
        ("shared.pt", torn, "bytes"),
        ("shared.pt", Path.unlink, "shared.pt: No such file or directory"),
        ("manifest.json", torn, "manifest.json: JSONDecodeError"),
        ("manifest.json", Path.unlink, "no manifest.json"),
        ("manifest.json", lambda file: file.write_text("[]"), "manifest.json: TypeError"),
        ("manifest.json", lambda file: shutil.copy(file.parents[1] / "step-00000001/manifest.json", file), "not for this step"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_passed_over_and_said(checkpoints, tmp_path, said, name, damage, reported):
    for step in (1, 2):
        checkpoints().save(step, state(step), {"a": torch.zeros(3)})
    damage(tmp_path / "kept/step-00000002" / name)
    assert checkpoints().load().step == 1
    [line] = said
    assert line.startswith("checkpoint step-00000002 is damaged (") and line.endswith("), using step-00000001")
    assert reported in line


def test_where_every_checkpoint_is_damaged_the_run_starts_anew_and_says_so(checkpoints, tmp_path, said):
    checkpoints().save(1, state(1), {})
    torn(tmp_path / "kept/step-00000001/shared.pt")
    assert checkpoints().load() is None
    assert len(said) == 1 and said[0].endswith("no other is intact: starting from the first step")


@pytest.mark.parametrize("name", ["manifest.json", "shared.pt", "own.pt"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_a_checkpoint_that_cannot_be_read_ends_the_run_and_stays(checkpoints, tmp_path, said, monkeypatch, name, error):
    """It may be whole: a run that took an older one would remove it with its next save."""
    for step in (1, 2):
        checkpoints().save(step, state(step), {})
    read = Path.read_bytes

    def fails(file: Path) -> bytes:
        if file == tmp_path / "kept/step-00000002" / name:
            raise OSError(error, os.strerror(error), str(file))
        return read(file)

    monkeypatch.setattr("training.data.storage.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("training.data.storage.LONGEST_PAUSE", 0.001)
    with monkeypatch.context() as evicted:
        evicted.setattr(Path, "read_bytes", fails)
        with pytest.raises(OSError, match=os.strerror(error)):
            checkpoints().load()
    assert said == [] and checkpoints().load().step == 2


def test_damaged_ones_do_not_take_the_place_of_good_ones(checkpoints, tmp_path):
    """Of 1, 2 and 3, the last is damaged: after 4 was saved, 1 is superfluous and 3 is not what is kept beside 4."""
    for step in (1, 2, 3):
        checkpoints(keep=3).save(step, state(step), {})
    torn(tmp_path / "kept/step-00000003/own.pt")
    again = checkpoints()
    assert again.load().step == 2
    again.save(4, state(4), {})
    assert names(tmp_path / "kept") == ["step-00000002", "step-00000004"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(checkpoints, tmp_path, said):
    for step in (1, 2):
        checkpoints().save(step, state(step), {})
    torn(tmp_path / "kept/step-00000002/shared.pt")
    again = checkpoints(keep=1)
    assert again.load().step == 1
    again.save(2, state(2), {})
    assert names(tmp_path / "kept") == ["step-00000002"] and checkpoints().load().step == 2


def test_what_a_kill_left_is_no_checkpoint_and_goes_with_the_next_one(checkpoints, tmp_path):
    checkpoints().save(1, state(1), {})
    for left in (".writing", ".replaced"):
        shutil.copytree(tmp_path / "kept/step-00000001", tmp_path / "kept" / left)
    assert checkpoints().load().step == 1
    checkpoints().save(2, state(2), {})
    assert names(tmp_path / "kept") == ["step-00000001", "step-00000002"]


def save_for_ever(folder: Path, first: int, finished, writing: str) -> None:
    kept = Checkpoints(folder, ALONE, keep=1, writing=writing)
    for step in range(first, 1_000_000):
        kept.save(step, state(step, 300_000), {"a": torch.full((4,), step)})
        finished.value = step


@pytest.mark.parametrize(("writing", "behind"), [("inline", 0), ("background", 1)])
def test_killed_at_any_moment_the_last_finished_checkpoint_is_there(tmp_path, checkpoints, said, writing, behind):
    """With a single one kept: it goes only after the next one is whole. In the background at most one is not on the disk yet."""
    context, rng, step, under_way = from_clean_forks(), random.Random(5), 0, 0
    for _ in range(25):
        finished = context.Value("q", step, lock=False)  # a kill would leave it locked
        process = context.Process(target=save_for_ever, args=(tmp_path / "kept", step + 1, finished, writing))
        process.start()
        end = time.monotonic() + 60
        while finished.value <= step + behind and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        under_way += ".writing" in names(tmp_path / "kept")
        loaded = checkpoints().load()
        assert finished.value - behind <= loaded.step <= finished.value + 1 and finished.value > step + behind
        assert set(loaded.shared["model"]["weight"].tolist()) == {float(loaded.step)}
        step = loaded.step
    assert said == [] and under_way, "no kill hit a checkpoint under way"


def test_in_the_background_training_goes_on_while_the_step_as_it_was_is_written(checkpoints, tmp_path, monkeypatch):
    may_go, write = threading.Event(), checkpoint_folder.write

    def later(*arguments) -> None:
        assert may_go.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpoint_folder, "write", later)
    kept, weights = checkpoints(writing="background"), torch.arange(3.0)
    kept.save(1, {"weights": weights}, {})
    weights.zero_()
    assert not list(tmp_path.glob("kept/step-*"))
    may_go.set()
    kept.finish()
    assert checkpoints().load().shared["weights"].tolist() == [0, 1, 2]


@contextlib.contextmanager
def files_of_at_most(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_checkpoint_and_does_not_end_training(checkpoints, tmp_path, said):
    kept = checkpoints(keep=1)
    kept.save(1, state(1), {})
    with files_of_at_most(100_000):
        kept.save(2, state(2, 300_000), {})
    assert names(tmp_path / "kept") == ["step-00000001"] and checkpoints().load().step == 1
    [line] = said
    assert line.startswith("WARNING: no checkpoint of step 2 in ") and "File too large" in line
    assert "make room for 2 checkpoints (compute.volume_gb), or keep fewer" in line
    kept.save(2, state(2, 300_000), {})  # there is room again
    assert checkpoints().load().step == 2


def test_the_checkpoint_that_a_job_ends_with_must_be_written(checkpoints, tmp_path):
    kept = checkpoints()
    kept.save(1, state(1), {})
    with files_of_at_most(100_000), pytest.raises(OSError, match="no checkpoint of step 2 .*: File too large"):
        kept.save(2, state(2, 300_000), {}, required=True)
    assert names(tmp_path / "kept") == ["step-00000001"]


@pytest.mark.parametrize(("value", "where"), [
    ({"deep": [np.float64(1)]}, r"shared\['deep'\]\[0\] is a float64"), ({np.int64(3): 1}, r"shared \(a key\) is a int64"),
    ((Path("x"),), r"shared\[0\] is a PosixPath"),
])  # fmt: skip
def test_what_could_not_be_read_again_is_refused_when_it_is_saved(checkpoints, value, where):
    with pytest.raises(TypeError, match=where):
        checkpoints().save(1, value, {})


def test_a_checkpoint_of_another_job_is_refused_with_what_differs(checkpoints):
    ours = {"model": "vit_tiny", "image_size": [32, 32], "seed": 0}
    checkpoints(fingerprint={**ours, "image_size": (32, 32)}).save(1, state(1), {})
    assert checkpoints(fingerprint=ours).load().step == 1
    with pytest.raises(
        ValueError, match='model is "vit_tiny" there and "vit_small" here; precision is absent there and "bf16" here'
    ) as error:
        checkpoints(fingerprint={**ours, "model": "vit_small", "precision": "bf16"}).load()
    assert "or start over with another `checkpoints`" in str(error.value) and "seed" not in str(error.value)


def test_a_checkpoint_of_other_images_is_refused(checkpoints):
    ours = checkpoints()
    ours.belong_to({"classes": "3 (ab)", "training images": "40 (cd)"})
    ours.save(1, state(1), {})
    others = checkpoints()
    others.belong_to({"classes": "3 (ab)", "training images": "80 (ef)"})
    with pytest.raises(
        ValueError, match=r'belongs to another job: training images is "40 \(cd\)" there and "80 \(ef\)" here\.'
    ):
        others.load()


def test_a_checkpoint_of_another_version_of_the_scripts_is_refused(checkpoints, tmp_path):
    checkpoints().save(1, state(1), {})
    [manifest] = tmp_path.rglob("manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1}))
    with pytest.raises(
        ValueError, match="of step 1 in .* was written by another version of these scripts: resume with that version"
    ):
        checkpoints().load()


def test_random_numbers_go_on_bit_for_bit(checkpoints):
    def draw() -> list:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    draw()  # each generator of normal numbers makes two at a time: one is held ready now
    checkpoints().save(1, state(1), rng_state(torch.device("cpu")))
    expected = [draw() for _ in range(3)]
    restore_rng(checkpoints().load().own, torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


def test_new_random_numbers_depend_on_seed_step_and_rank():
    def draw(*given: int) -> tuple:
        reseed(*given)
        return random.random(), np.random.rand(), torch.rand(1).item()

    drawn = [draw(*given) for given in [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0)]]
    assert draw(1, 2, 3) == drawn[0]
    assert all(len(set(column)) == 4 for column in zip(*drawn))


TWO_RANKS = """
    import resource
    from training.engine.checkpoints import Checkpoints
    with process_group() as world:
        said, seen = [], {}

        def checkpoints(model):  # each rank has a disk of its own
            return Checkpoints(out / f"host-{world.rank}", world, fingerprint={"model": model}, log=said.append)

        own = {"mine": torch.arange(3, dtype=torch.uint8) + world.rank, "float": torch.tensor(world.rank + 0.5)}
        shared = {"weight": torch.ones(4)} if world.is_first else None
        kept = checkpoints("a")
        kept.save(5, shared, own)
        loaded = checkpoints("a").load()
        seen["loaded"] = [loaded.step, loaded.shared["weight"].tolist(), *(loaded.own[name].tolist() for name in own)]
        try:
            checkpoints("b").load()
        except ValueError as error:
            seen["refused"] = str(error)
        if world.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        kept.save(6, shared, own)
        try:
            kept.save(7, shared, own, required=True)
        except OSError as error:
            seen["full"] = str(error)
        if world.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (out / f"{world.rank}.json").write_text(json.dumps([seen, said]))
"""


def test_two_ranks_save_and_load_as_one(tmp_path, checkpoints):
    """Only rank 0's disk holds anything; both ranks get it, each with its own part, and both are told what they must know."""
    done = run_ranks(tmp_path, TWO_RANKS)
    assert [item.returncode for item in done] == [0, 0], done
    for rank in range(2):
        seen, said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["loaded"] == [5, [1.0] * 4, [rank, rank + 1, rank + 2], rank + 0.5]
        assert 'model is "a" there and "b" here' in seen["refused"] and "step 7" in seen["full"]
        assert [line[:29] for line in said] == ["WARNING: no checkpoint of ste"][rank:]
    assert names(tmp_path / "host-0") == ["step-00000005"] and not (tmp_path / "host-1").exists()
    (tmp_path / "host-0").rename(tmp_path / "kept")
    alone = checkpoints(fingerprint={"model": "a"}).load()
    assert alone.shared["weight"].tolist() == [1.0] * 4 and not alone.same_world
    assert {name: value.tolist() for name, value in alone.own.items()} == {"float": 1.0}, (
        "the mean over ranks, and no random numbers"
    )


def test_a_job_finds_its_checkpoints_where_sagemaker_keeps_them(tmp_path):
    job = {"SM_CURRENT_HOST": "algo-1", "SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert read_environment(job).checkpoint_dir is None, "a job without `checkpoints` has no such folder"
    (tmp_path / "checkpoints").mkdir()
    assert read_environment(job).checkpoint_dir == tmp_path / "checkpoints"
    assert read_environment({"SM_CHANNEL_TRAIN": "x"}).checkpoint_dir == Path("output/checkpoints")


def test_what_a_run_found_by_itself_is_there_for_one_that_goes_on(checkpoints):
    assert checkpoints().decided("size") is None
    first = checkpoints()
    first.decide("size", 8)
    first.save(1, state(1), {})
    assert checkpoints().decided("size") == 8 and checkpoints().decided("another") is None
    two = World(0, 2, 0, torch.device("cpu"), "none", "test")
    assert checkpoints(two)._noted("size") is None, "of another number of ranks"


def test_a_manifest_that_cannot_be_read_says_nothing_of_the_run_before(checkpoints, tmp_path):
    for step, size in ((1, 8), (2, 4)):
        kept = checkpoints()
        kept.load()
        kept.decide("size", size)
        kept.save(step, state(step), {})
    manifest = tmp_path / "kept/step-00000002/manifest.json"
    assert checkpoints().decided("size") == 4
    for damage in ("{", "[]", '{"decided": 3, "world_size": 1}'):
        manifest.write_text(damage)
        assert checkpoints().decided("size") == 8
    manifest.unlink()
    assert checkpoints().decided("size") == 8
