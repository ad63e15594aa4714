"""What users of SageMaker's SDK and of other launchers ran into, and what this kit answers offline.

Each test's docstring names the thread. Tested elsewhere:
#4187, #5091, #2875 (no ignore file): test_plans.py, test_ignored_files_stay_and_the_kits_training_package_comes_along,
    test_what_git_ignores_stays, test_source_package.py, test_files_that_hold_secrets_by_their_name_stay_and_are_named, test_what_looks_like_a_secret_is_refused…
#4247 and accelerate #980 (booleans): test_hyperparameters.py, test_every_type_survives_the_real_toolkit; test_request.py,
    test_hyperparameters_survive_quotes_and_types
#6188 (Debugger and Profiler on by default): test_request.py, test_profiling_and_debugger_are_off_unless_asked_for
#645, autogluon-cloud #133 and #2776's online part (throttling, expired tokens, data): with the emulator
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from launcher.config import hyperparameters
from tests.aws.conftest import complaints
from tests.aws.jobs import FSX, GOOD, GROUPED, KIT, S3, VPC, changed
from tests.conftest import ROOT

KT = ROOT / "configs/kt_food_tag.yaml"


def planned(values: dict) -> launcher.Plan:
    return launcher.plan(launcher.from_values(values), on="aws")


def errors(values: dict) -> list[str]:
    return [f"{issue.key}: {issue.found}" for issue in planned(values).errors]


def test_spot_is_refused_until_there_are_checkpoints_and_is_then_asked_for_with_them():
    """https://github.com/aws/sagemaker-python-sdk/issues/1040"""
    refused = launcher.plan(launcher.load(KT, ["compute.spot=true"]), on="aws")
    assert [issue.key for issue in refused.errors] == ["compute.spot"] and refused.request is None
    taken = launcher.plan(launcher.load(KT, ["compute.spot=true", f"checkpoints={S3}kt/checkpoints"]), on="aws")
    assert taken.errors == ()
    assert taken.request["EnableManagedSpotTraining"] is True
    assert taken.request["CheckpointConfig"] == {"S3Uri": f"{S3}kt/checkpoints"}
    assert taken.request["StoppingCondition"] == {"MaxRuntimeInSeconds": 108000, "MaxWaitTimeInSeconds": 216000}


@pytest.mark.parametrize(
    ("most", "one_more"),
    [
        ({"hyperparameters": {"text": "x" * 2498}}, {"hyperparameters": {"text": "x" * 2499}}),
        ({"hyperparameters": {"x" * 256: 1}}, {"hyperparameters": {"x" * 257: 1}}),
        ({"hyperparameters": {f"h{n}": n for n in range(92)}}, {"hyperparameters": {f"h{n}": n for n in range(93)}}),
        ({"environment": {"E": "x" * 512}}, {"environment": {"E": "x" * 513}}),
        ({"environment": {"E" * 512: "x"}}, {"environment": {"E" * 513: "x"}}),
        ({"environment": {f"E{n}": "x" for n in range(100)}}, {"environment": {f"E{n}": "x" for n in range(101)}}),
        ({"inputs": {f"c{n}": {"s3": S3} for n in range(20)}}, {"inputs": {f"c{n}": {"s3": S3} for n in range(21)}}),
        ({"tags": {"x" * 128: "x" * 256}}, {"tags": {"x" * 129: "x" * 256}}),
        ({"metrics": {"x" * 255: "(" + "." * 498 + ")"}}, {"metrics": {"x" * 256: "(" + "." * 498 + ")"}}),
    ],
    ids=lambda values: f"{next(iter(values))} {len(str(values))}",
)
def test_sagemakers_limits_are_counted_to_the_last_character(good, most, one_more):
    """https://github.com/aws/sagemaker-python-sdk/issues/984, also /314, /2932 and /6016"""
    plan = planned(changed(good, most))
    assert plan.errors == () and complaints(plan.request) == []
    assert len(plan.request["HyperParameters"]) <= hyperparameters.MAX_COUNT
    assert len(errors(changed(good, one_more))) == 1


def test_nobody_hooks_into_a_frozen_teacher_unasked_and_asking_for_it_is_refused():
    """https://github.com/awslabs/sagemaker-debugger/issues/401, also /184 and sagemaker-python-sdk/issues/1401"""
    assert "DebugHookConfig" not in launcher.plan(launcher.load(KT), on="aws").request
    asked = launcher.plan(launcher.load(KT, ["debugger={}", f"checkpoints={S3}kt/checkpoints"]), on="aws")
    assert ["frozen teacher" in issue.found for issue in asked.errors] == [False, True]
    assert "not available in distributed training" in asked.errors[0].found


def test_a_plan_says_in_words_what_is_sampled(good):
    """https://github.com/aws/sagemaker-python-sdk/pull/6188"""
    assert "profiling   off" in str(planned(good))
    assert "profiling   system metrics every 200 ms" in str(
        planned(changed(good, {"profiling": {"system_interval_ms": 200}}))
    )


@pytest.mark.parametrize("kind", ["ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge", "ml.p6-b200.48xlarge"])
def test_smddp_on_p5_is_refused_with_the_reason_and_torchrun_is_taken(good, kind):
    """https://github.com/aws/sagemaker-python-sdk/issues/4988 and https://github.com/aws/sagemaker-training-toolkit/issues/191"""
    values = changed(good, {"compute.instance_type": kind, "image": {"framework_version": "2.8.0", "python": "py312"}})
    [first, second] = planned(values).errors
    assert f"smddp on {kind}" in first.found and "torchrun (nccl uses EFA there)" in first.fix
    assert "its image has no SageMaker data parallel library" in second.found and "2.5.1" in second.valid
    torchrun = planned({**values, "distribution": "torchrun"})
    assert torchrun.errors == () and "--nproc_per_node 8" in " ".join(torchrun.hosts[1].command)


def test_smddp_is_started_by_its_own_launcher_or_not_at_all(good):
    """https://github.com/aws/deep-learning-containers/issues/3746, also accelerate/issues/492: never something else unsaid"""
    plan = planned(good)
    assert plan.request["HyperParameters"]["sagemaker_distributed_dataparallel_enabled"] == "true"
    assert "sagemaker_torch_distributed_enabled" not in plan.request["HyperParameters"]
    assert " ".join(plan.hosts[0].command).startswith("mpirun --host algo-1:8,algo-2:8 -np 16 smddprun python -m mpi4py train.py")  # fmt: skip
    own = changed(good, {"image": {"uri": "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"}})
    unknown = [issue for issue in planned(own).issues if issue.key == "distribution"]
    assert [issue.level for issue in unknown] == ["not checked"] and "import smdistributed" in unknown[0].fix


def test_a_channel_reads_fsx_and_the_network_to_reach_it_is_demanded(good):
    """https://github.com/huggingface/accelerate/issues/1485 and /1517"""
    assert len(errors(changed(good, {"inputs.train": FSX}))) == 1
    request = planned(changed(good, {"inputs.train": FSX, "network": VPC})).request
    assert request["InputDataConfig"][0]["DataSource"]["FileSystemDataSource"] == {
        "FileSystemId": "fs-0123456789abcdef0",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": "/fsx/train",
        "FileSystemAccessMode": "ro",
    }
    assert request["VpcConfig"] == {"Subnets": ["subnet-0a1b2c3d"], "SecurityGroupIds": ["sg-0a1b2c3d"]}


def test_data_that_is_not_there_is_reported_before_anything_is_uploaded(good, tmp_path):
    """https://github.com/aws/sagemaker-python-sdk/issues/2776, the part that needs no network"""
    folder = tmp_path / "train"
    values = changed(good, {"inputs.train": {"folder": str(folder)}})
    assert errors(values) == [f"inputs.train: {folder}: no such folder"]
    folder.mkdir()
    assert errors(values) == [f"inputs.train: {folder} is empty"]
    for number in range(3):
        (folder / f"{number}.bin").write_bytes(b"x" * 2**20)
    plan = planned(values)
    assert plan.errors == ()
    assert f"upload      {folder}: 3 files, 3.1 MB, to {S3}runs/inputs/train-" in str(plan)


def test_a_job_that_could_cost_more_than_allowed_is_refused_before_anything_is_sent(good, tmp_path):
    """https://github.com/aws/sagemaker-python-sdk/issues/4643"""
    config = tmp_path / "job.yaml"
    compute = {"compute.price_per_hour": 30.0, "compute.max_hours": 10.0}
    config.write_text(repr(changed(good, compute)))
    plan = launcher.plan(launcher.load(config), on="aws")
    assert plan.price.ceiling == 602 and "at most $602.00: 10 h and 2 min to stop at $60.00 an hour" in str(plan)
    command = [sys.executable, "-m", "launcher", "run", str(config), "--on", "aws", "--max-cost", "601"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "$602.00" in done.stderr and "Traceback" not in done.stderr


def test_a_job_whose_price_nobody_knows_passes_no_limit(good, tmp_path):
    """https://github.com/aws/sagemaker-python-sdk/issues/4643"""
    config = tmp_path / "job.yaml"
    config.write_text(repr(changed(good, {"region": "eu-central-1"})))
    command = [sys.executable, "-m", "launcher", "run", str(config), "--on", "aws", "--max-cost", "1e9"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "price" in done.stderr and "Traceback" not in done.stderr


def test_a_cluster_of_several_types_gets_its_channels_as_written_and_no_defaults(good):
    """https://github.com/aws/sagemaker-python-sdk/issues/6089, also /5555 and /5225"""
    grouped = changed(good, {"compute": GROUPED})
    assert errors(changed(grouped, {"inputs.train.instance_groups": ["gpus"]})) == [
        "inputs.validation: no instance_groups, but train has them: SageMaker requires them on every channel or on none"
    ]
    request = planned(
        changed(grouped, {"inputs.train.instance_groups": ["gpus"], "inputs.validation.instance_groups": ["cpus"]})
    ).request
    assert set(request["ResourceConfig"]) == {"InstanceGroups", "VolumeSizeInGB"}
    sources = [channel["DataSource"]["S3DataSource"] for channel in request["InputDataConfig"]]
    assert [source["InstanceGroupNames"] for source in sources] == [["gpus"], ["cpus"]]
    assert all(set(channel) == {"ChannelName", "DataSource"} for channel in request["InputDataConfig"])
    sources = planned(grouped).request["InputDataConfig"]
    assert not any("InstanceGroupNames" in channel["DataSource"]["S3DataSource"] for channel in sources)


def test_the_core_needs_no_aws_package_and_each_sdk_is_imported_in_one_file():
    """https://github.com/aws/sagemaker-python-sdk/issues/5299 and /1118, and zenml's pull request 4235"""
    needed = [line for line in importlib.metadata.requires("vision-launcher") or [] if "extra ==" not in line]
    assert needed and not [line for line in needed if line.startswith(("sagemaker", "boto"))]
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "launcher").rglob("*.py")
        if "sagemaker" in imported(path) and "emulator" not in path.parts
    }
    assert importers == {"launcher/aws/estimator.py", "launcher/aws/model_trainer.py"}


def imported(path: Path) -> set[str]:
    """Top-level modules that a file imports when it runs, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_a_job_that_only_ran_here_reports_at_once_all_that_sagemaker_needs():
    """A user who adds nothing but --on aws."""
    values = {"name": "a", **{key: value for key, value in KIT.items() if value is not None}}
    values |= {"compute": {"price_per_hour": 1.0}, "inputs": GOOD["inputs"]}
    assert [issue.key for issue in planned(values).errors] == [
        *("role", "region", "output", "image", "compute.instance_type")
    ]
