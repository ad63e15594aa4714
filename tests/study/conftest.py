"""What the tests of tuning share: a script that waits for its reads, and a config of a small job."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml

from tests.photo_folders import draw_photos
from tests.study.slow_reads import slow_reads


@pytest.fixture
def script(tmp_path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(slow_reads(samples=320, seconds=0.02)))
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with photographs and a config of a job that does little beside writing checkpoints."""
    folder = tmp_path_factory.mktemp("tune")
    draw_photos(folder, range(40), range(40, 42))
    job = {
        "name": "tiny",
        "script": "train_classifier.py",
        "inputs": {name: {"folder": str(folder / name)} for name in ("train", "validation")},
        "checkpoints": "s3://amzn-s3-demo-bucket/tiny",
        "hyperparameters": {
            "model": "vit_tiny_patch16_224",
            "model_options": {"img_size": 16, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 2},
            "image_size": 16,
            "global_batch_size": 4,
            "num_workers": 0,
            "epochs": 16,
            "evaluate_every": 100,
            "log_every": 2,
            "checkpoint_every": 1,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return folder
