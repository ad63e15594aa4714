"""A real run of two groups whose one serving host is too slow: the diagnosis names it, with the number of hosts to take."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

import launcher
from tests.conftest import assert_nothing_left

COSTLY = 24
"""Rounds of augmentation, which make an image dearer than the small model's step."""


@pytest.fixture
def data(tmp_path):
    """Two classes of coarse images of 300 by 200 pixels, for an epoch of 21 steps."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 672), ("validation", 4)):
        for number in range(count):
            pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((300, 200), Image.Resampling.BICUBIC).save(buffer := io.BytesIO(), "JPEG")
            file = tmp_path / "data" / part / f"class-{number % 2}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(buffer.getvalue())
    return tmp_path / "data"


@pytest.mark.slow
def test_a_starved_run_is_advised_to_take_more_servers(data):
    groups = [{"name": name, "instance_type": "ml.c5.large", "instance_count": 1} for name in ("gpus", "cpus")]
    settings = {
        **{"model": "mobilenetv3_small_050", "image_size": 64, "global_batch_size": 32, "worker_type": "remote"},
        **{"epochs": 2, "max_steps": 40, "log_every": 2, "evaluate_every": 2, "augmentation_load": COSTLY},
    }
    job = launcher.from_values(
        {
            "name": "starved",
            "script": "train_classifier.py",
            "compute": {"instance_groups": groups, "training_groups": ["gpus"]},
            "inputs": {part: {"folder": str(data / part)} for part in ("train", "validation")},
            "hyperparameters": settings,
        }
    )
    run = launcher.run(launcher.plan(job))
    assert run.wait(170) == "Completed", run.outcome()
    assert_nothing_left(run)
    diagnosis = run.diagnose()
    [finding] = [one for one in diagnosis.findings if one.kind == "too_few_servers"]
    fix = finding.fixes[0]
    assert (fix.setting, fix.now) == ("compute.instance_groups.1.instance_count", 1) and fix.value > 1
    assert fix.command == f"launcher replay {run.name} compute.instance_groups.1.instance_count={fix.value}"
    assert "all hosts of this run share one machine" in str(finding.evidence)
    served = diagnosis.to_dict()["servers"]
    assert served["images"] >= 40 * 32 and (served["alone"], served["failures"]) == (0, 0)
    assert f"in the logged steps {served['images']:,} images came from other hosts" in str(diagnosis)
    assert not any("worker" in (each.setting or "") for one in diagnosis.findings for each in one.fixes)
