"""Runs of label_images.py and of train_kd.py in forked processes: images of three classes, one of them broken, and a teacher of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.entrypoints.ranks import run_ranks
from tests.entrypoints.teachers import CLASSES, OPTIONS, exported

IMAGES, VIEWS = 31, 3

HEAD = f"""
    from training.settings.distillation import DistillationSettings, LabellingSettings, TeacherCacheSettings
    from training.teacher.cache import TeacherCache
    os.chdir(out)
    common = dict(
        student="vit_tiny_patch16_224", student_options={ {**OPTIONS, "drop_rate": 0.0}!r}, image_size=16, num_workers=0, log_every=1,
        system_monitor=False, max_shift_pixels=2, mixup=0.5, learning_rate=0.01, epochs={VIEWS}, evaluate_every=9,
    )
    kept = TeacherCacheSettings(views={VIEWS}, top_k=2, where=str(out / "bank"), precision="int8")
"""

LABEL = (
    HEAD
    + """
    import label_images
    label_images.main(LabellingSettings(**common, global_batch_size=12, batch_size_per_device=2, teacher_cache=kept))
"""
)


def channels_in(folder: Path) -> dict[str, str]:
    """Images of three classes, one of them broken, and a teacher of them; the variables that name them."""
    rng = np.random.RandomState(0)
    for split, count in (("train", IMAGES), ("validation", 6)):
        for number in range(count):
            file = folder / f"data/{split}/{CLASSES[number % 3]}/{number:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.randint(0, 256, (18, 18), np.uint8)).save(file)
    (folder / "data/train/b/04.png").write_bytes(b"no image")
    exported(folder / "teacher")
    places = {"TRAIN": "data/train", "VALIDATION": "data/validation", "TEACHER": "teacher"}
    return {f"SM_CHANNEL_{name}": str(folder / place) for name, place in places.items()}


def labelled(folder: Path, size: int = 1, text: str = LABEL) -> dict:
    """A bank in folder/bank, filled by N processes; result.json of the run."""
    folder.mkdir(exist_ok=True)
    for rank in run_ranks(folder, text, size=size):
        assert rank.returncode == 0, rank.stderr
    return json.loads((folder / "output/data/algo-1/result.json").read_text())
