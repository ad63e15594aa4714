"""Banks with features, in whole runs: filled by labelling or by training, killed, resumed, and read by students without a teacher."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.entrypoints.bank_runs import HEAD, IMAGES, LABEL, VIEWS, labelled
from tests.entrypoints.ranks import run_ranks, started_ranks
from tests.entrypoints.test_labelling import _has_batches, channels, files_of  # noqa: F401

FEATURES = """
    from training.settings.features import FeatureSettings
    common["features"] = FeatureSettings(level={level!r}, loss={loss!r})
"""

TRAIN = """
    import train_kd
    from training.teacher.frozen import Teacher
    asked = Teacher.with_features
    def watched(self, images):
        if len(images) > 1:  # one image: its shape
            print("asked", flush=True)
        return asked(self, images)
    Teacher.with_features = watched
    students = {"near": {"seed": 3}, "other": {"learning_rate": 0.02, "teacher_loss_weight": 0.0}}
    train_kd.main(DistillationSettings(**common, global_batch_size=10, students=students, teacher_cache=kept))
"""


def text_of(script: str, level: str = "tokens", loss: str = "cosine") -> str:
    """A script's text, whose settings learn features."""
    first, second = (HEAD, script.removeprefix(HEAD)) if script.startswith(HEAD) else (HEAD, script)
    return first + FEATURES.format(level=level, loss=loss) + second


def trained(folder: Path, text: str, size: int = 1) -> tuple[list[dict[str, float]], str]:
    """The losses of a run's steps, and what it printed."""
    folder.mkdir(exist_ok=True)
    ranks = run_ranks(folder, text, size=size)
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr
    lines = map(json.loads, (folder / "output/data/algo-1/metrics.jsonl").read_text().splitlines())
    losses = [{key: value for key, value in line.items() if key.endswith("loss")} for line in lines]
    return [line for line in losses if "near/feature_loss" in line], "".join(rank.stdout for rank in ranks)


def test_three_processes_fill_the_features_that_one_fills_byte_for_byte_and_a_kill_changes_nothing(channels):  # noqa: F811
    text = text_of(LABEL)
    one, three = labelled(channels / "one", text=text), labelled(channels / "three", size=3, text=text)
    assert one["digest"] == three["digest"] and files_of(channels / "three/bank") == files_of(channels / "one/bank")
    manifest = json.loads((channels / "one/bank/manifest.json").read_text())["logits of"]
    assert (manifest["feature level"], manifest["feature shape"], manifest["feature precision"]) == (
        "tokens",
        [2, 2, 24],
        "int8",
    )
    slowed = text.replace(
        "import label_images",
        "fill = TeacherCache.fill\n"
        "    TeacherCache.fill = lambda *what: (fill(*what), time.sleep(0.03), print('batch', flush=True))\n"
        "    import label_images",
    )
    (folder := channels / "killed").mkdir()
    for wanted in (random.Random(5).randrange(2, 8), 1):
        (folder / "stdout-0").unlink(missing_ok=True)  # what the one before said
        with started_ranks(folder, slowed.replace("0.03", "0.2"), size=2) as processes:  # long enough to be seen
            wait_until(partial(_has_batches, folder / "stdout-0", wanted), 60, "a few batches")
            assert all(process.is_alive() for process in processes)
        # here both were killed with SIGKILL, wherever they were
    result = labelled(folder, size=2, text=slowed)
    assert files_of(folder / "bank") == files_of(channels / "one/bank")
    assert result["labels_found"] > 0 and result["labels_computed"] < VIEWS * (IMAGES + 1)


@pytest.mark.parametrize(("level", "loss"), [("tokens", "smooth_l1"), ("pooled", "relational")])
def test_several_students_learn_features_from_a_bank_without_a_teacher_as_the_run_that_filled_it(channels, level, loss):  # noqa: F811
    text = text_of(TRAIN, level, loss)
    (channels / "data/train/b/04.png").unlink()  # a broken image has no record: its batch asks the teacher each time
    filling, said = trained(channels / "filling", text)
    assert said.count("asked") == len(filling) == 3 * VIEWS
    assert any("near/feature_loss" in line and "other/feature_loss" in line for line in filling), filling[0]
    (channels / "filled").mkdir()
    (channels / "filled/bank").symlink_to(channels / "filling/bank")
    filled, said = trained(channels / "filled", text)
    assert filled == filling and "asked" not in said, "bit for bit"
    (channels / "of-two").mkdir()
    (channels / "of-two/bank").symlink_to(channels / "filling/bank")
    if loss == "smooth_l1":  # relations are those of a process's images
        of_two, said = trained(channels / "of-two", text, size=2)
        assert "asked" not in said
        for one, two in zip(filled, of_two, strict=True):
            assert two == pytest.approx(one, rel=1e-3)


def test_labelling_fills_the_bank_that_training_reads(channels):  # noqa: F811
    (channels / "data/train/b/04.png").unlink()
    labelled(channels / "bank", size=2, text=text_of(LABEL, "pooled"))
    before = files_of(channels / "bank/bank")
    losses, said = trained(channels / "bank", text_of(TRAIN, "pooled"))
    assert "asked" not in said and len(losses) == 3 * VIEWS and files_of(channels / "bank/bank") == before
