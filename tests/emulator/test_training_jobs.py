"""Training jobs from their request to their end, as a client sees them; most run at the same time."""

from __future__ import annotations

import importlib.util
import json

import pytest

from launcher.backends import opt_ml
from tests.emulator.conftest import BUCKET, ROLE, SAY, channel, unpack

RESULTS = (
    SAY
    + """
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text("a model")
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"] + ".txt").write_text("measured")
"""
)

REPORTS_ALL = (
    RESULTS
    + """
    sys.stdout.write("loss: 0.75\\n")
    sys.stdout.write("loss: 0.25\\n")
    say(
        hosts=json.loads(os.environ["SM_HOSTS"]),
        host=os.environ["SM_CURRENT_HOST"],
        group=os.environ["SM_CURRENT_INSTANCE_GROUP"],
        groups=json.loads(os.environ["SM_INSTANCE_GROUPS_DICT"]),
        hyperparameters=json.loads(os.environ["SM_HPS"]),
        channels={name: files(os.environ["SM_CHANNEL_" + name.upper()]) for name in json.loads(os.environ["SM_CHANNELS"])},
        training=json.loads(os.environ["SM_DISTRIBUTION_INSTANCE_GROUPS"]),
        rank=os.environ.get("RANK"),
        world=os.environ.get("WORLD_SIZE"),
        environment=dict(os.environ),
    )
"""
)

METRICS = {"MetricDefinitions": [{"Name": "loss", "Regex": "loss: ([0-9.]+)"}]}
PROFILER = {"S3OutputPath": f"s3://{BUCKET}/profile", "ProfilingIntervalInMilliseconds": 500}


@pytest.fixture(scope="module", autouse=True)
def jobs(emulator, aws, tmp_path_factory):
    """Every job of this module, started at once: each is looked at by the test that is about it."""
    for key in ("train/a.txt", "train/deep/b.txt", "train/deep/c.txt", "train-small/d.txt", "single.txt"):
        aws.put(f"data/{key}", key)
    shared = tmp_path_factory.mktemp("file system")
    (shared / "food/train").mkdir(parents=True)
    (shared / "food/train/apple.jpg").touch()
    emulator.add_subnet("subnet-0123456789abcdef0", "eu-west-1")
    emulator.add_file_system("fs-0123456789abcdef0", "FSxLustre", "eu-west-1", shared)
    emulator.add_file_system("fs-0123456789abcdef1", "EFS", "eu-west-1", shared)
    start = aws.start
    start(
        "completes",
        REPORTS_ALL,
        HyperParameters={"epochs": "3", "name": json.dumps("it's")},
        AlgorithmSpecification=METRICS,
        ProfilerConfig=PROFILER,
        Environment={"COLOUR": "blue", "AWS_REGION": "the job must not set this"},
        RetryStrategy={"MaximumRetryAttempts": 2},
        Tags=[{"Key": "project", "Value": "kit"}],
        InputDataConfig=[
            channel("train", "data/train"),
            channel("small", "data/train-", distribution="ShardedByS3Key"),
        ],
    )
    start(
        "two-hosts",
        REPORTS_ALL,
        ResourceConfig={"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2},
        HyperParameters={
            "sagemaker_distributed_dataparallel_enabled": "true",
            "sagemaker_instance_type": "ml.p4d.24xlarge",
        },
        InputDataConfig=[
            channel("all", "data/train/"),
            channel("part", "data/train/", distribution="ShardedByS3Key"),
            channel("single", "data/single.txt", mode="FastFile"),
        ],
    )
    groups = [
        {"InstanceGroupName": "big", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        {"InstanceGroupName": "small", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
    ]
    mixed = aws.request("two-groups", REPORTS_ALL)
    mixed["ResourceConfig"] = {"InstanceGroups": groups, "VolumeSizeInGB": 30}
    mixed["InputDataConfig"] = [
        channel("everyone", "data/single.txt"),
        channel("bigs", "data/single.txt", InstanceGroupNames=["big"]),
    ]
    aws.client("sagemaker").create_training_job(**mixed)
    groups = [
        {"InstanceGroupName": "cpus", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
        {"InstanceGroupName": "gpus", "InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
    ]
    trained = aws.request(
        "training-group",
        REPORTS_ALL,
        HyperParameters={
            "sagemaker_torch_distributed_enabled": "true",
            "sagemaker_distribution_instance_groups": '["gpus"]',
        },
    )
    trained["ResourceConfig"] = {"InstanceGroups": groups, "VolumeSizeInGB": 30}
    trained["InputDataConfig"] = [
        channel("part", "data/train/", distribution="ShardedByS3Key", InstanceGroupNames=["gpus"]),
        channel("all", "data/train/", InstanceGroupNames=["cpus", "gpus"]),
    ]
    aws.client("sagemaker").create_training_job(**trained)
    start(
        "names-opt-ml",
        SAY
        + """
    rank = json.loads(pathlib.Path("/opt/ml/input/config/resourceconfig.json").read_text())["current_host"]
    pathlib.Path(f"/opt/ml/model/of-{rank}.txt").write_text(pathlib.Path("/opt/ml/input/data/train/a.txt").read_text())
""",
        ResourceConfig={"InstanceCount": 2},
        InputDataConfig=[channel("train", "data/train/")],
    )
    folders = SAY + "    say(there=os.listdir(os.environ['SAGEMAKER_BASE_DIR']))\n"
    start("keeps-nothing", folders)
    start(
        "keeps-state",
        folders,
        CheckpointConfig={"S3Uri": f"s3://{BUCKET}/checkpoints/none-yet", "LocalPath": "/opt/ml/state"},
    )
    start("keeps-checkpoints", folders, CheckpointConfig={"S3Uri": f"s3://{BUCKET}/checkpoints/none-yet"})
    start("fails", RESULTS + "    raise ValueError('no such luck')\n")
    start(
        "says-why",
        SAY + "    pathlib.Path(os.environ['SM_OUTPUT_DIR'], 'failure').write_text('x' * 2000)\n    sys.exit(3)\n",
    )
    start("is-killed", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    start("has-no-data", InputDataConfig=[channel("train", "data/valid")])
    start("has-no-bucket", RESULTS, OutputDataConfig={"S3OutputPath": "s3://not-a-bucket"})
    start("pipes", InputDataConfig=[channel("train", "data/train/", mode="Pipe")])
    start("cuts-a-prefix", InputDataConfig=[channel("train", "data/train", mode="FastFile")])
    start(
        "is-not-compressed",
        RESULTS,
        OutputDataConfig={"S3OutputPath": f"s3://{BUCKET}/output/", "CompressionType": "NONE"},
    )
    start("requires-pip", RESULTS, files={"requirements.txt": "pip>=9\n"})
    start("requires-more", RESULTS, files={"requirements.txt": "launcher-has-no-such-package==1.0\n"})
    vpc = {"Subnets": ["subnet-0123456789abcdef0"], "SecurityGroupIds": ["sg-0123456789abcdef0"]}
    start(
        "mounts",
        REPORTS_ALL,
        VpcConfig=vpc,
        InputDataConfig=[mount("lustre", "FSxLustre", 0, "/fsx/food/train"), mount("efs", "EFS", 1, "/food")],
    )
    start("mounts-elsewhere", VpcConfig=vpc, InputDataConfig=[mount("train", "FSxLustre", 0, "/other/food/train")])


def mount(name: str, kind: str, number: int, directory: str) -> dict:
    source = {
        "FileSystemId": f"fs-0123456789abcdef{number}",
        "FileSystemType": kind,
        "DirectoryPath": directory,
        "FileSystemAccessMode": "ro",
    }
    return {"ChannelName": name, "DataSource": {"FileSystemDataSource": source}}


def test_a_job_goes_through_sagemakers_states_and_leaves_model_and_output_in_s3(aws):
    job = aws.ended("completes")
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Completed", "Completed")
    transitions = job["SecondaryStatusTransitions"]
    assert [entry["Status"] for entry in transitions] == [
        "Starting",
        "Downloading",
        "Training",
        "Uploading",
        "Completed",
    ]
    assert all(entry["StartTime"] <= entry["EndTime"] and entry["StatusMessage"] for entry in transitions)
    assert job["CreationTime"] <= job["TrainingStartTime"] < job["TrainingEndTime"] == job["LastModifiedTime"]
    trained = (job["TrainingEndTime"] - job["TrainingStartTime"]).total_seconds()
    assert 1 <= job["BillableTimeInSeconds"] == job["TrainingTimeInSeconds"] <= trained + 1
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{BUCKET}/output/completes/output/model.tar.gz"
    archives = aws.objects("output/completes/output/")
    assert unpack(archives["model.tar.gz"]) == {"model.txt": "a model"}
    assert unpack(archives["output.tar.gz"]) == {"127.0.0.1.txt": "measured"}


def test_the_description_holds_all_of_the_request_and_the_metrics_of_the_log(aws):
    job = aws.ended("completes")
    assert job["ProfilerConfig"] == PROFILER and job["ProfilingStatus"] == "Enabled"
    assert job["Environment"]["COLOUR"] == "blue"
    assert job["RetryStrategy"] == {"MaximumRetryAttempts": 2}
    assert job["AlgorithmSpecification"]["MetricDefinitions"] == METRICS["MetricDefinitions"]
    assert [(metric["MetricName"], metric["Value"]) for metric in job["FinalMetricDataList"]] == [("loss", 0.25)]
    assert aws.client("sagemaker").list_tags(ResourceArn=job["TrainingJobArn"])["Tags"] == [
        {"Key": "project", "Value": "kit"}
    ]


def test_the_log_is_in_cloudwatch_line_by_line_and_in_order(aws):
    aws.ended("completes")
    lines = aws.log("completes")
    assert lines.index("loss: 0.75") < lines.index("loss: 0.25") < len(lines) - 1
    assert lines[-1].endswith("Reporting training SUCCESS")


def test_a_host_has_a_clean_environment_which_leads_to_the_emulator(aws, emulator, monkeypatch):
    aws.ended("completes")
    said = aws.said("completes")
    environment = said["environment"]
    assert said["hyperparameters"] == {"epochs": 3, "name": "it's"}
    assert environment["COLOUR"] == "blue"
    assert environment["AWS_REGION"] == "eu-west-1"
    assert environment["AWS_ENDPOINT_URL"] == emulator.url
    assert environment["TRAINING_JOB_NAME"] == "completes"
    assert environment["TRAINING_JOB_ARN"] == aws.describe("completes")["TrainingJobArn"]
    assert "PYTEST_CURRENT_TEST" not in environment


def test_a_prefix_takes_all_keys_that_begin_with_it(aws):
    aws.ended("completes")
    channels = aws.said("completes")["channels"]
    assert channels["train"] == ["a.txt", "deep/b.txt", "deep/c.txt", "train-small/d.txt"]
    assert channels["small"] == ["train-small/d.txt"]


def test_fast_file_mode_refuses_half_a_folder_name(aws):
    job = aws.ended("cuts-a-prefix")
    assert job["TrainingJobStatus"] == "Failed"
    assert "partial S3 prefix is not supported" in job["FailureReason"]
    assert "Current S3 prefix: [data/train], found S3 object: [data/train-small/d.txt]." in job["FailureReason"]


def test_two_hosts_know_each_other_and_torchrun_stands_in_for_smddp(aws):
    job = aws.ended("two-hosts")
    assert job["TrainingJobStatus"] == "Completed", job.get("FailureReason")
    assert job["HyperParameters"]["sagemaker_distributed_dataparallel_enabled"] == "true"
    first, second = (aws.said("two-hosts", host) for host in ("algo-1", "algo-2"))
    assert first["hosts"] == second["hosts"] == ["127.0.0.1", "127.0.0.2"]
    assert (first["host"], second["host"]) == ("127.0.0.1", "127.0.0.2")
    assert [(said["rank"], said["world"]) for said in (first, second)] == [("0", "2"), ("1", "2")]
    assert "torchrun starts the script" in aws.log("two-hosts")[0]
    assert int(first["environment"]["OMP_NUM_THREADS"]) >= 1


def test_a_script_that_names_opt_ml_gets_its_hosts_own(aws, tmp_path):
    job = aws.ended("names-opt-ml")
    if why := opt_ml.why_not(tmp_path):  # a kernel without private mounts: the host's log says so
        assert f"launcher: a script that names /opt/ml does not find this host's folder: {why}" in aws.log(
            "names-opt-ml"
        )
        return
    assert job["TrainingJobStatus"] == "Completed", job.get("FailureReason")
    archive = aws.objects("output/names-opt-ml/output/")["model.tar.gz"]
    assert unpack(archive) == {"of-127.0.0.1.txt": "train/a.txt", "of-127.0.0.2.txt": "train/a.txt"}


@pytest.mark.parametrize(
    ("name", "made"),
    [("keeps-nothing", set()), ("keeps-state", {"state"}), ("keeps-checkpoints", {"checkpoints"})],
)
def test_only_a_job_with_checkpoints_has_their_folder_from_its_first_run_on(aws, name, made):
    """As on SageMaker: without the folder, scripts keep none."""
    aws.ended(name)
    assert {*aws.said(name)["there"]} & {"state", "checkpoints"} == made


def test_a_sharded_channel_is_divided_and_a_replicated_one_is_whole_on_every_host(aws):
    aws.ended("two-hosts")
    first, second = (aws.said("two-hosts", host)["channels"] for host in ("algo-1", "algo-2"))
    whole = ["a.txt", "deep/b.txt", "deep/c.txt"]
    assert first["all"] == second["all"] == whole
    assert (first["part"], second["part"]) == (["a.txt", "deep/c.txt"], ["deep/b.txt"])
    assert first["single"] == second["single"] == ["single.txt"]


def test_output_of_all_hosts_is_in_one_archive(aws):
    aws.ended("two-hosts")
    archives = aws.objects("output/two-hosts/output/")
    assert set(unpack(archives["output.tar.gz"])) == {"127.0.0.1.txt", "127.0.0.2.txt"}
    assert unpack(archives["model.tar.gz"]) == {"model.txt": "a model"}


def test_instance_groups_have_their_own_channels(aws):
    assert aws.ended("two-groups")["TrainingJobStatus"] == "Completed"
    first, second = (aws.said("two-groups", host) for host in ("algo-1", "algo-2"))
    assert (first["group"], second["group"]) == ("big", "small")
    assert first["groups"]["small"] == {
        "instance_group_name": "small",
        "instance_type": "ml.c5.xlarge",
        "hosts": ["127.0.0.2"],
    }
    assert set(first["channels"]) == {"everyone", "bigs"} and set(second["channels"]) == {"everyone"}


def test_a_launcher_starts_on_the_training_group_alone(aws):
    assert aws.ended("training-group")["TrainingJobStatus"] == "Completed"
    cpus, *gpus = (aws.said("training-group", f"algo-{number}") for number in (1, 2, 3))
    assert (cpus["rank"], cpus["world"]) == (None, None)
    assert [(host["rank"], host["world"]) for host in gpus] == [("0", "2"), ("1", "2")]
    hosts = [cpus, *gpus]
    assert [host["training"] for host in hosts] == [["gpus"]] * 3
    assert [host["group"] for host in hosts] == ["cpus", "gpus", "gpus"]
    assert {host["environment"]["MASTER_ADDR"] for host in hosts} == {"127.0.0.2"}
    [port] = {host["environment"]["TRAINING_SERVERS_PORT"] for host in hosts}
    assert port not in {host["environment"]["MASTER_PORT"] for host in hosts}
    assert "part" not in cpus["channels"]
    assert [host["channels"]["part"] for host in gpus] == [["a.txt", "deep/c.txt"], ["deep/b.txt"]]
    assert [host["channels"]["all"] for host in hosts] == [["a.txt", "deep/b.txt", "deep/c.txt"]] * 3
    assert "TRAINING_SERVERS_PORT" not in aws.said("two-hosts")["environment"]


def test_a_failing_script_gives_awss_failure_reason_and_still_its_results(aws):
    job = aws.ended("fails")
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Failed", "Failed")
    assert job["FailureReason"].startswith("AlgorithmError: ExecuteUserScriptError:")
    assert "no such luck" in job["FailureReason"]
    assert job["FailureReason"].endswith(", exit code: 1")
    assert "model.tar.gz" in aws.objects("output/fails/output/")


def test_the_failure_file_is_cut_after_1024_characters(aws):
    assert aws.ended("says-why")["FailureReason"] == f"AlgorithmError: {'x' * 1024}, exit code: 1"


def test_a_killed_host_is_reported_by_its_exit_code(aws):
    assert aws.ended("is-killed")["FailureReason"] == "AlgorithmError: , exit code: 137"


def test_a_channel_without_objects_fails_in_awss_words(aws):
    job = aws.ended("has-no-data")
    assert job["TrainingJobStatus"] == "Failed"
    assert [entry["Status"] for entry in job["SecondaryStatusTransitions"]] == ["Starting", "Downloading", "Failed"]
    assert job["FailureReason"] == (
        f'ClientError: Data download failed:No S3 objects found under S3 URL "s3://{BUCKET}/data/valid" given in input data '
        "source. Please ensure that the bucket exists in the selected region (eu-west-1), that objects exist under that S3 "
        f'prefix, and that the role "{ROLE}" has "s3:ListBucket" permissions on bucket "{BUCKET}".'
    )


def test_an_output_bucket_that_is_not_there_fails_the_upload(aws):
    reason = aws.ended("has-no-bucket")["FailureReason"]
    assert reason.startswith("ClientError: Artifact upload failed:") and "NoSuchBucket" in reason


def test_pipe_mode_fails_with_the_reason(aws):
    assert "the emulator has no pipes" in aws.ended("pipes")["FailureReason"]


def test_uncompressed_results_are_stored_as_files(aws):
    job = aws.ended("is-not-compressed")
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{BUCKET}/output/is-not-compressed/output/model/"
    assert aws.objects("output/is-not-compressed/output/") == {
        "model/model.txt": b"a model",
        "data/127.0.0.1.txt": b"measured",
    }


def test_requirements_that_are_met_pass_and_others_fail_without_an_installation(aws):
    assert aws.ended("requires-pip")["TrainingJobStatus"] == "Completed"
    job = aws.ended("requires-more")
    assert job["TrainingJobStatus"] == "Failed"
    assert "InstallRequirementsError" in job["FailureReason"]
    assert importlib.util.find_spec("launcher_has_no_such_package") is None


def test_channels_of_file_systems_are_their_folders(aws):
    assert aws.ended("mounts")["TrainingJobStatus"] == "Completed"
    assert aws.said("mounts")["channels"] == {"efs": ["train/apple.jpg"], "lustre": ["apple.jpg"]}
    assert "has no directory /other/food/train" in aws.ended("mounts-elsewhere")["FailureReason"]
