"""Training on a complete label bank: no teacher is there, the losses are the same, and a bank of something else or with gaps is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training.data.batches import TrainingBatches
from training.teacher import complete_bank
from training.teacher.complete_bank import CompleteBank
from training.teacher.label_bank import digest_of, view_file
from training.teacher.logit_records import record_layout

from tests.entrypoints.bank_runs import HEAD, VIEWS, channels_in, labelled
from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.student_runs import STUDENTS, curve, run_all, weights
from tests.entrypoints.student_runs import channels as many_students
from tests.entrypoints.teacher_caches import ALONE, CLASSES, PARTS, batch_of, filled, forget, kept, no_teacher
from tests.entrypoints.teacher_caches import IMAGES as OF_A_CACHE

TRAIN = (
    HEAD
    + """
    import train_kd
    from dataclasses import replace
    kept = replace(kept, complete="SM_CHANNEL_TEACHER" not in os.environ)
    train_kd.main(DistillationSettings(**{**common, **CHANGES}, global_batch_size=10, max_grad_norm=None, teacher_cache=kept))
"""
)


@pytest.fixture
def bank(tmp_path, monkeypatch) -> Path:
    """The folder of a bank that a labelling run filled, one image of which is broken; its channels are this process's."""
    for name, place in channels_in(tmp_path).items():
        monkeypatch.setenv(name, place)
    labelled(tmp_path / "labels")
    return tmp_path / "labels/bank"


def trained(folder: Path, bank: Path, size: int = 1, **changes: Any) -> list[Any]:
    """A run in a folder with a copy of the bank, with the teacher where there is a channel of it."""
    if not folder.exists():
        folder.mkdir()
        shutil.copytree(bank, folder / "bank")
    return run_ranks(folder, TRAIN.replace("CHANGES", repr(changes)), size=size)


def succeeded(ranks: list[Any]) -> str:
    """What the first rank said."""
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr
    return ranks[0].stdout


@pytest.mark.parametrize("size", [1, 2])
def test_the_losses_and_weights_are_those_of_the_run_with_the_teacher_beside_the_same_bank(
    tmp_path, bank, monkeypatch, size
):
    said = succeeded(trained(tmp_path / "with", bank, size))
    assert "teacher vit_tiny_patch16_224: " in said and "teacher_cache, once it is filled, saves" in said
    shutil.rmtree(tmp_path / "teacher")
    monkeypatch.delenv("SM_CHANNEL_TEACHER")
    before = {file.name: file.read_bytes() for file in bank.iterdir()}
    said = succeeded(trained(tmp_path / "without", bank, size))
    outputs = [tmp_path / name / "output" for name in ("with", "without")]
    assert curve(outputs[0]) == curve(outputs[1]) and len(curve(outputs[0])) == 3 * VIEWS
    assert all("teacher_loss" in losses for losses in curve(outputs[1]).values())
    first, second = map(weights, outputs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert {file.name: file.read_bytes() for file in (tmp_path / "without/bank").iterdir()} == before, (
        "nothing is written"
    )
    assert "no teacher is loaded or measured" in said
    assert "teacher vit_tiny_patch16_224: " not in said and "teacher_cache, once it is filled" not in said


def test_the_result_and_the_card_say_whose_answers_they_were_and_nothing_of_agreement(tmp_path, bank, monkeypatch):
    monkeypatch.delenv("SM_CHANNEL_TEACHER")
    succeeded(trained(tmp_path / "run", bank))
    manifest = json.loads((bank / "manifest.json").read_text())
    [result_file] = (tmp_path / "run").rglob("result.json")
    result, card = json.loads(result_file.read_text()), (tmp_path / "run/output/model/README.md").read_text()
    digest = manifest["logits of"]["teacher weights"]
    assert result["teacher"] == {
        "model": "vit_tiny_patch16_224",
        "digest": digest,
        "precision": "fp32",
        "answers": "a complete label bank; no teacher was loaded",
        "label_bank": str(tmp_path / "run/bank"),
        "label_bank_digest": digest_of(bank),
    }
    assert "validation_accuracy" in result and not [name for name in result if name.startswith("teacher_")]
    assert f"| digest | {digest} |" in card and "knowledge-distillation" in card


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_several_students_that_are_killed_in_mid_epoch_go_on_to_the_bit_without_their_teacher(tmp_path, size):
    """The bank is one that a training run filled on its way."""
    data = many_students(tmp_path / "data")
    taught = {name: own for name, own in STUDENTS.items() if name != "labels"}
    cache = {"views": 2, "top_k": 2, "where": str(tmp_path / "bank")}
    of_all = {"students": taught, "on_broken_image": "fail"}
    assert [one.returncode for one in run_all(tmp_path, data, {"with": {**of_all, "teacher_cache": cache}}, size=size)] == [0] * size  # fmt: skip
    shutil.rmtree(data / "teacher")
    runs = {"without": {**of_all, "teacher_cache": {**cache, "complete": True}}}
    assert -9 in [one.returncode for one in run_all(tmp_path, data, runs, size=size, killed=True)]
    done = run_all(tmp_path, data, runs, size=size)
    assert "resuming from the checkpoint of step 6" in done[0].stdout, done[0].stderr
    for name in taught:
        rest = {step: losses for step, losses in curve(tmp_path / "with", name).items() if step > 6}
        assert curve(tmp_path / "without", name) == rest and len(rest) == 4
        first, second = (weights(tmp_path / run, name) for run in ("with", "without"))
        assert all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.parametrize("size", [1, 2])
def test_every_gap_is_named_with_its_view_before_the_first_step(tmp_path, bank, monkeypatch, size):
    monkeypatch.delenv("SM_CHANNEL_TEACHER")
    whole = view_file(bank, 1).read_bytes()
    view_file(bank, 1).write_bytes(bytes(len(whole)))
    view_file(bank, 2).unlink()
    view_file(bank, 3).write_bytes(whole[:-1])
    ranks = trained(tmp_path / "run", bank, size)
    assert all(rank.returncode not in (0, None) for rank in ranks)
    said = re.search(r"teacher_cache.complete says.*", ranks[0].stderr)
    assert said and "views 1 to 2: 29 of 30 each; view 3: " in said[0], "a broken image needs none"
    assert f"view-0003.bin has {len(whole) - 1} bytes instead of {len(whole)}" in said[0]
    assert "launcher label fills it" in said[0] and "with the channel teacher" in said[0]
    assert not [line for file in (tmp_path / "run").rglob("metrics.jsonl") for line in file.read_text().splitlines()]


def test_a_bank_of_other_views_is_refused_by_the_name_of_the_setting_that_differs(tmp_path, bank, monkeypatch):
    monkeypatch.delenv("SM_CHANNEL_TEACHER")
    [rank] = trained(tmp_path / "run", bank, max_shift_pixels=3, cutmix=1.0)
    assert rank.returncode != 0
    assert (
        "was made with other transform (max_shift_pixels: there 2, here 3; mixing.cutmix: there 0.0, here 1.0):"
        in rank.stderr
    )


# --- the bank alone

NAMES = [f"class {number}" for number in range(CLASSES)]
ABOUT = {"teacher": "a teacher", "class names": NAMES, "transform": {"seed": 0, "mixing": {"mixup": 0.5}}}


def opened(where: Path, **changes: Any) -> CompleteBank:
    parts = {name: value for name, value in PARTS.items() if name in ("transform", "data")}
    values = {"parts": parts, "about": ABOUT, "images": OF_A_CACHE, "views": 1, "top_k": 4, "precision": "fp16"}
    values |= {"stand_in": int, "drawn": OF_A_CACHE, **changes}
    layout = record_layout(len(values["about"]["class names"]), values.pop("top_k"), values.pop("precision"))
    return CompleteBank(where, layout=layout, world=ALONE, **values)


def batches(**changes: Any) -> TrainingBatches:
    values = {"images": OF_A_CACHE, "global_batch_size": 10, "world": ALONE, "seed": 0, "views": 1}
    return TrainingBatches(**{**values, **changes})


def test_it_gives_the_answers_that_were_kept_and_says_whose_they_are(tmp_path):
    filled(tmp_path, about=ABOUT)
    bank = opened(tmp_path)
    bank.require_answers(batches(), 100)
    assert bank.cache.begin_epoch(range(1, 2), np.arange(OF_A_CACHE))
    assert torch.equal(bank.cache.answers(batch_of(np.arange(OF_A_CACHE)), no_teacher), kept(tmp_path))
    assert (bank.about()["model"], bank.about()["digest"], bank.about()["precision"]) == (
        "a teacher",
        "ab" * 32,
        "fp32",
    )
    assert not bank.cache.writable and f"SHA-256 {'ab' * 32}" in bank.summary()


def test_all_in_which_a_bank_differs_is_named_at_once_but_for_what_only_a_teacher_could_say(tmp_path):
    filled(tmp_path, about=ABOUT, parts={**PARTS, "teacher weights": "99" * 32, "dtype": "bf16"})
    opened(tmp_path)
    other = {"class names": [*NAMES[:5], "another", *NAMES[6:]], "transform": {"seed": 0, "mixing": {"mixup": 0.1}}}
    parts = {"transform": "00" * 32, "data": "11" * 32}
    with pytest.raises(ValueError) as refused:
        opened(tmp_path, parts=parts, about=other, images=61, top_k=None, precision="int8")
    said = str(refused.value)
    for difference in (
        "transform (mixing.mixup: there 0.5, here 0.1)",
        "data (there efefefefefef…, here 111111111111…)",
        "images (there 60, here 61)",
        "top_k (there 4, here None)",
        "precision (there fp16, here int8)",
        "class names (number 5: there class 5, here another)",
    ):
        assert difference in said
    assert "teacher weights" not in said and "dtype" not in said
    assert said.endswith("change these to the bank's values, or give a bank made with this job's images and settings")
    with pytest.raises(
        ValueError, match=r"other classes \(there 12, here 11\), class names \(number 11: there class 11"
    ):
        opened(tmp_path, about={**ABOUT, "class names": NAMES[:11]})


def test_a_folder_without_a_bank_is_refused_and_nothing_is_created(tmp_path):
    with pytest.raises(ValueError, match=r"holds no label bank \(no manifest.json\)"):
        opened(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "manifest.json").write_text('{"logits of": {}}')
    with pytest.raises(ValueError, match="does not name its classes"):
        opened(tmp_path)


def test_only_what_a_run_draws_has_to_be_there(tmp_path):
    cache = filled(tmp_path, about=ABOUT)
    first = batches().indices(1)
    forget(cache, tmp_path, first[30:].tolist())
    opened(tmp_path).require_answers(batches(), 3)
    with pytest.raises(ValueError, match=r"view 1: 10 of 40\. launcher label"):
        opened(tmp_path).require_answers(batches(), 4)
    with pytest.raises(ValueError, match=r"view 1: 30 of 60; view 2: 60 of 60"):
        opened(tmp_path, views=2).require_answers(batches(views=2), 100)


def test_several_views_of_an_image_at_once_need_their_answers_in_every_epoch_of_a_visit(tmp_path):
    """Two views of half of the images an epoch: the first view's answers are needed in epochs 1 and 2."""
    filled(tmp_path, about=ABOUT)
    together = batches(views=2, together=2)
    half, other = (np.unique(together.indices(epoch)) for epoch in (1, 2))
    assert len(half) == len(other) == 30 and not {*half} & {*other}
    with pytest.raises(ValueError, match=r"view 2: 30 of 30\. launcher"):
        opened(tmp_path, views=2).require_answers(together, 6)
    with pytest.raises(ValueError, match=r"view 2: 60 of 60\. launcher"):
        opened(tmp_path, views=2).require_answers(together, 12)


def test_broken_images_need_no_answer_however_many_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(complete_bank, "TRIED", 2)
    cache, broken = filled(tmp_path, about=ABOUT), [3, 4, 5, 20, 40]
    forget(cache, tmp_path, broken)

    def stand_in(index: int) -> int:
        return next(other for other in range(index, OF_A_CACHE) if other not in broken)

    opened(tmp_path, stand_in=stand_in).require_answers(batches(), 6)
    forget(cache, tmp_path, [50])
    with pytest.raises(ValueError, match="view 1: 1 of 60"):
        opened(tmp_path, stand_in=stand_in).require_answers(batches(), 6)
    forget(cache, tmp_path, [6])  # which stands in for 3, 4 and 5
    with pytest.raises(ValueError, match="view 1: [1-6] of 60"):
        opened(tmp_path, stand_in=stand_in).require_answers(batches(), 6)


def test_answers_that_are_lost_while_training_end_the_run_with_the_fix(tmp_path, bank, monkeypatch):
    monkeypatch.delenv("SM_CHANNEL_TEACHER")
    losing = TRAIN.replace(
        "import train_kd",
        "import train_kd\n"
        "    from training.teacher.complete_bank import CompleteBank\n"
        "    require = CompleteBank.require_answers\n"
        "    def lose(self, *what):\n"
        "        require(self, *what)\n"
        "        file = out / 'bank/view-0002.bin'\n"
        "        file.write_bytes(bytes(file.stat().st_size))\n"
        "    CompleteBank.require_answers = lose",
    )
    (tmp_path / "run").mkdir()
    shutil.copytree(bank, tmp_path / "run/bank")
    [rank] = run_ranks(tmp_path / "run", losing.replace("CHANGES", "{}"), size=1)
    assert (
        rank.returncode != 0 and "was complete when the run began, but lacks answers now: launcher label" in rank.stderr
    )


def test_a_probe_measures_steps_that_read_the_bank(tmp_path, bank, monkeypatch):
    monkeypatch.delenv("SM_CHANNEL_TEACHER")
    succeeded(trained(tmp_path / "run", bank, probe_seconds=20.0))
    [file] = (tmp_path / "run").rglob("probe.json")
    probe = json.loads(file.read_text())
    assert probe["one_batch"] and probe["one_batch_without_teacher"] is None and "teacher_forward" in probe["phases"]


def test_only_views_that_follow_each_other_are_named_together():
    lacking = [(1, "29 of 30"), (3, "29 of 30"), (4, "29 of 30"), (5, "all")]
    assert [*complete_bank._by_view(lacking)] == ["view 1: 29 of 30", "views 3 to 4: 29 of 30 each", "view 5: all"]


def test_a_bank_that_does_not_say_its_classes_is_refused_in_a_line(tmp_path):
    filled(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "created": {}}))
    with pytest.raises(ValueError, match="does not name its classes") as refused:
        opened(tmp_path)
    assert len(str(refused.value)) < 400
