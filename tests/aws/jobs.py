"""A job that SageMaker accepts, and parts to change it by."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

P4D, P3, G5, CPU = "ml.p4d.24xlarge", "ml.p3.16xlarge", "ml.g5.12xlarge", "ml.m5.xlarge"
FSX = {"fsx": "fs-0123456789abcdef0", "path": "/fsx/train"}
VPC = {"subnets": ["subnet-0a1b2c3d"], "security_groups": ["sg-0a1b2c3d"]}
GROUPS = [
    {"name": "gpus", "instance_type": P4D, "instance_count": 2},
    {"name": "cpus", "instance_type": "ml.c5.4xlarge", "instance_count": 1},
]
GROUPED = {"instance_groups": GROUPS, "training_groups": ["gpus"]}
KIT = {"source": None, "script": "train_classifier.py", "hyperparameters": {"model": "resnet18"}}
"""One of this kit's own scripts instead of the user's."""
REMOTE = {
    **KIT,
    "compute": GROUPED,
    "distribution": "torchrun",
    "hyperparameters": {"model": "resnet18", "worker_type": "remote"},
}
"""The same, with the other group's hosts preprocessing for the training group's."""

S3 = "s3://amzn-s3-demo-bucket/"
SERVED = {"worker_type": "remote", "without_servers": "fail", "teacher_servers": {"top_k": 10}}
TAUGHT = {
    **REMOTE,
    "script": "train_kd.py",
    "hyperparameters": {"student": "resnet18", **SERVED},
    "inputs": {
        "train": {"s3": f"{S3}train/", "instance_groups": ["gpus", "cpus"]},
        "validation": {"s3": f"{S3}validation/", "instance_groups": ["gpus"]},
        "teacher": {"s3": f"{S3}teacher/", "instance_groups": ["cpus"]},
    },
}
"""A job whose other group's hosts run the teacher too."""

GOOD = {
    "name": "test",
    "script": "train.py",
    "role": "arn:aws:iam::123456789012:role/SageMakerTraining",
    "region": "us-west-2",
    "output": f"{S3}runs",
    "image": {"framework_version": "2.0.1", "python": "py310"},
    "compute": {"instance_type": P4D, "instance_count": 2},
    "distribution": "smddp",
    "inputs": {"train": {"s3": f"{S3}train/"}, "validation": {"s3": f"{S3}validation/"}},
}


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with dotted keys set; a whole part is replaced by its own key."""
    made = deepcopy(values)
    for key, value in changes.items():
        at, (*above, last) = made, key.split(".")
        for name in above:
            at = at.setdefault(name, {})
        at[last] = deepcopy(value)
    return made


def with_a_script(source: Path) -> dict[str, Any]:
    """GOOD with a script of the user's own, which imports nothing and declares no settings."""
    (source / "train.py").write_text("print('trained')\n")
    return {**GOOD, "source": str(source)}
