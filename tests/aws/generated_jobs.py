"""Jobs that SageMaker accepts, generated, and the request of each."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import strategies as st

import launcher
from launcher.aws import request
from tests.conftest import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
NAME = "kt-food-tag-20261121-070503-vibw"

BASE = {
    "name": "test",
    "script": "train.py",
    "role": "arn:aws:iam::123456789012:role/SageMakerTraining",
    "region": "us-west-2",
    "output": "s3://amzn-s3-demo-bucket/prefix",
    "image": {"framework_version": "2.0.1", "python": "py310"},
    "compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 2},
}


def uploaded(job: launcher.Job) -> dict[str, str]:
    """Input -> where its upload would lie."""
    return {
        name: f"s3://amzn-s3-demo-bucket/prefix/inputs/{name}/"
        for name, given in job.inputs.items()
        if given.source in ("folder", "file", "run")
    }


def planned(job: launcher.Job) -> dict[str, Any]:
    return request.training_job(job, NAME, uploaded(job))


names = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)
texts = st.text(string.ascii_letters + string.digits + " '\"${}=,:/-_ü码", max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=4,
)
s3 = st.builds(lambda path: f"s3://amzn-s3-demo-bucket/{path}", st.from_regex(r"\A[a-z0-9/_-]{1,30}\Z"))


def maybe(strategy):
    return st.none() | strategy


def without_none(mapping):
    return {name: value for name, value in mapping.items() if value is not None}


from_s3 = st.fixed_dictionaries(
    {"s3": s3},
    optional={
        "mode": st.sampled_from(["File", "FastFile", "Pipe"]),
        "sharded": st.booleans(),
        "content_type": st.sampled_from(["application/x-image", "image/jpeg"]),
        "compression": st.sampled_from(["None", "Gzip"]),
        "record_wrapper": st.sampled_from(["None", "RecordIO"]),
        "shuffle_seed": st.integers(0, 2**31),
        "data_type": st.sampled_from(["S3Prefix", "ManifestFile"]),
    },
)
manifest = st.just(
    {
        "s3": "s3://amzn-s3-demo-bucket/m.json",
        "data_type": "AugmentedManifestFile",
        "mode": "Pipe",
        "attributes": ["source-ref", "class"],
    }
)
file_system = st.fixed_dictionaries(
    {"path": st.just("/fsx/train")},
    optional={"access": st.sampled_from(["ro", "rw"]), "content_type": st.just("image/jpeg")},
).flatmap(
    lambda rest: st.sampled_from([{"fsx": "fs-0123456789abcdef0", **rest}, {"efs": "fs-0123456789abcdef0", **rest}])
)
here = st.sampled_from([{"folder": "data"}, {"file": "model.tar.gz"}, {"run": "teacher"}])
hours = st.floats(0.01, 600).map(lambda number: round(number, 3))


@st.composite
def machines(draw):
    if draw(st.integers(0, 4)):
        chosen = {
            "instance_type": draw(
                st.sampled_from(["ml.p4d.24xlarge", "ml.p3dn.24xlarge", "ml.g5.xlarge", "ml.m5.large"])
            ),
            "instance_count": draw(st.integers(1, 40)),
        }
    else:
        chosen = {
            "instance_groups": draw(
                st.permutations(
                    [
                        {"name": "gpus", "instance_type": "ml.p4d.24xlarge", "instance_count": draw(st.integers(1, 9))},
                        {"name": "cpus", "instance_type": "ml.c5.4xlarge", "instance_count": 2},
                    ]
                )
            )
        }
    spot = draw(st.booleans())
    chosen |= without_none({
        "volume_gb": draw(maybe(st.integers(1, 16000))),
        "max_hours": draw(hours),
        "spot": spot,
        "keep_alive_minutes": draw(maybe(st.integers(1, 60))) if not spot else None,
        "max_attempts": draw(maybe(st.integers(1, 30))),
        "volume_key": draw(maybe(st.just("arn:aws:kms:us-west-2:123456789012:key/1234"))),
        "training_plan": draw(maybe(st.just("arn:aws:sagemaker:us-west-2:123456789012:training-plan/plan-1"))),
    })  # fmt: skip
    return chosen


@st.composite
def jobs(draw):
    compute = draw(machines())
    grouped = "instance_groups" in compute
    distribution = draw(st.sampled_from(["smddp", "torchrun", "none"]))
    if grouped:
        compute["training_groups"] = (
            ["gpus"] if distribution != "none" else draw(st.sampled_from([[], ["gpus"], ["cpus", "gpus"]]))
        )
    if distribution == "torchrun" and draw(st.booleans()):
        compute["processes_per_host"] = draw(st.integers(1, 8))
    profiling = st.fixed_dictionaries(
        {},
        optional={
            "system_interval_ms": st.sampled_from([100, 200, 500, 1000, 5000, 60000]),
            "profiler": st.fixed_dictionaries(
                {}, optional={"cpu_seconds": st.integers(1, 7200), "file_rotation_seconds": st.integers(1, 999)}
            ),
            "rules": st.dictionaries(
                st.sampled_from(["CPUBottleneck", "GPUMemoryIncrease"]), st.just({"patience": 5}), max_size=2
            ).map(lambda rules: {**rules, "ProfilerReport": {"CPUBottleneck_threshold": 90}}),
            "output": s3,
        },
    )
    values_of = without_none({
        **BASE,
        "compute": compute,
        "distribution": distribution,
        "custom_mpi_options": draw(maybe(st.just("-verbose -x NCCL_DEBUG=VERSION"))) if distribution == "smddp" else None,
        "image": draw(st.sampled_from([{"framework_version": "2.0.1", "python": "py310"}, {"framework_version": "2.8.0", "python": "py312"}, {"uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/own:latest"}])),
        "inputs": draw(st.dictionaries(names, from_s3 | manifest | file_system | here, max_size=4)),
        "hyperparameters": draw(st.dictionaries(names, values, max_size=6)),
        "environment": draw(st.dictionaries(st.from_regex(r"\A[A-Z][A-Z_]{0,10}\Z"), texts, max_size=3)),
        "tags": draw(st.dictionaries(names, names, max_size=3)),
        "metrics": draw(maybe(st.dictionaries(names, st.just("loss ([0-9.]+)"), max_size=3))),
        "checkpoints": draw(maybe(s3 | s3.map(lambda uri: {"s3": uri, "path": "/opt/ml/saved"}))),
        "code": draw(maybe(s3)),
        "output_key": draw(maybe(st.just("alias/training"))),
        "compress_output": draw(st.booleans()),
        "network": draw(st.fixed_dictionaries({}, optional={"isolation": st.booleans(), "encrypt_traffic": st.booleans()}).flatmap(lambda some: st.sampled_from([some, {**some, "subnets": ["subnet-0a1b2c3d"], "security_groups": ["sg-0a1b2c3d"]}]))),
        "profiling": draw(maybe(profiling)),
    })  # fmt: skip
    if "checkpoints" not in values_of:
        values_of |= without_none(
            {
                "debugger": draw(
                    maybe(
                        st.just(
                            {
                                "collections": {"losses": {"save_interval": "50"}, "all": {}},
                                "hook_parameters": {"x": "1"},
                            }
                        )
                    )
                )
            }
        )
    return launcher.from_values(values_of)
