"""Declared secrets, with AWS Secrets Manager of the emulator: only the script gets their values."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import boto3
import pytest

import launcher
from launcher.planner import python_start
from tests.aws.conftest import BUCKET, REGION, described, started

VALUE = "s3cr3t-" + "x" * 20


def shows(*names: str) -> str:
    """A script that prints how long these variables' values are, and starts a child that does the same."""
    lengths = f"import os\nfor name in {names}:\n    print(name + ' ' + str(len(os.environ[name])), flush=True)\n"
    child = "subprocess.run([sys.executable, '-c', lengths], check=True)"
    return f"import subprocess, sys\nlengths = {lengths!r}\nexec(lengths)\n{child}\n"


@pytest.fixture
def stored(connected):
    """Names of secrets in the emulator's Secrets Manager."""
    client = boto3.client("secretsmanager", region_name=REGION)
    held = {"plain": VALUE, "fields": json.dumps({"token": VALUE, "port": 5432})}
    made = {name: client.create_secret(Name=name, SecretString=text)["ARN"] for name, text in held.items()}
    yield made
    for arn in made.values():
        client.delete_secret(SecretId=arn, ForceDeleteWithoutRecovery=True)


def holding(run: launcher.Run) -> list[str]:
    """Files of a run's folder and objects below its output that hold the value, unpacked too."""
    found = [str(path) for path in run.folder.path.rglob("*") if path.is_file() and _holds(path.read_bytes())]
    s3 = boto3.client("s3", region_name=REGION)
    for item in s3.list_objects_v2(Bucket=BUCKET, Prefix=f"runs/{run.name}/").get("Contents", ()):
        body = s3.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
        found += [item["Key"]] if _holds(body) else []
    return found


def _holds(content: bytes) -> bool:
    unpacked = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else b""
    return VALUE.encode() in content + unpacked


def test_a_job_reads_its_secrets_itself_and_only_their_names_travel(sagemaker_job, stored):
    secrets = {
        "HF_TOKEN": {"secretsmanager": "plain"},
        "BY_ARN": {"secretsmanager": stored["plain"]},
        "OF_A_FIELD": {"secretsmanager": "fields", "key": "token"},
    }
    plan = launcher.plan(sagemaker_job(shows(*secrets), secrets=secrets), on="aws")
    assert plan.errors == () and not secrets.keys() & plan.request.get("Environment", {}).keys()
    for name in secrets:
        [printed] = [line for line in str(plan).splitlines() if line.startswith(f"  secret      {name}: ")]
        assert printed.endswith(" of AWS Secrets Manager")
        [unknown] = [issue for issue in plan.issues if issue.key == f"secrets.{name}"]
        assert unknown.level == "not checked" and "secretsmanager:GetSecretValue" in unknown.found
    run = launcher.run(plan)
    assert run.wait(120) == "Completed", run.outcome()
    lines = [line for _, line in run.logs()]
    for name in secrets:
        assert lines.count(f"{name} {len(VALUE)}") == 2, "a child inherits it"
    assert holding(run) == [] and VALUE not in json.dumps(described(run.name), default=str)


def test_torchruns_workers_and_a_sitecustomize_of_the_image_are_reached(sagemaker_job, stored, tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text("import os\nos.environ['OF_THE_IMAGE'] = 'seen'\n")
    text = """
        import os, sys
        sys.stdout.write(f"rank {os.environ['RANK']} {len(os.environ['HF_TOKEN'])} {os.environ['OF_THE_IMAGE']}\\n")
    """
    job = sagemaker_job(
        text,
        secrets={"HF_TOKEN": {"secretsmanager": "plain"}},
        environment={"PYTHONPATH": str(tmp_path / "hidden")},
        distribution="torchrun",
        compute={"processes_per_host": 2},
    )
    run = started(job)
    assert run.wait(120) == "Completed", run.outcome()
    seen = {line for _, line in run.logs() if line.startswith("rank ")}
    assert seen == {f"rank {rank} {len(VALUE)} seen" for rank in range(2)}


def test_a_job_whose_secret_cannot_be_read_ends_at_once_and_names_it(sagemaker_job, stored):
    secrets = {"A": {"secretsmanager": "gone"}, "B": {"secretsmanager": "fields", "key": "user"}}
    run = started(sagemaker_job("print('began')\n", secrets=secrets))
    assert run.wait(120) == "Failed"
    text = " ".join(line for _, line in run.logs())
    assert "secrets.A: gone of AWS Secrets Manager cannot be read: no such secret" in text
    assert "secrets.B: fields" in text and "the field user" in text and "began" not in text
    assert "secrets.A: gone" in described(run.name)["FailureReason"]
    assert holding(run) == []


def test_a_replay_of_a_job_reads_its_secrets_again(sagemaker_job, stored):
    first = started(sagemaker_job(shows("HF_TOKEN"), secrets={"HF_TOKEN": {"secretsmanager": "plain"}}))
    assert first.wait(120) == "Completed"
    plan = launcher.replay(first.name)
    assert plan.errors == () and [file.path for file in plan.files].count(python_start.FILE) == 1
    here = launcher.run(launcher.replay(first.name, on="process"))
    assert here.wait(60) == "Completed" and holding(here) == []


def test_a_run_on_this_machine_reads_them_with_your_credentials_and_passes_on_only_the_values(script_job, stored):
    text = """
        import boto3, os
        assert len(os.environ["HF_TOKEN"]) == 27 and os.environ["PORT"] == "5432"
        assert boto3.Session().get_credentials() is None
    """
    secrets = {"HF_TOKEN": {"secretsmanager": "plain"}, "PORT": {"secretsmanager": "fields", "key": "port"}}
    run = launcher.run(launcher.plan(script_job(text, secrets=secrets, region=REGION)))
    assert run.wait(60) == "Completed" and holding(run) == []


def test_a_run_on_this_machine_does_not_start_without_its_secrets(script_job, stored):
    secrets = {"A": {"secretsmanager": "gone"}, "B": {"secretsmanager": "fields", "key": "user"}}
    plan = launcher.plan(script_job("print('began')\n", secrets=secrets, region=REGION))
    with pytest.raises(launcher.UserError) as refused:
        launcher.run(plan)
    assert [issue.key for issue in refused.value.issues] == ["secrets.A", "secrets.B"]
    assert "no such secret" in str(refused.value) and VALUE not in str(refused.value)
    assert launcher.attach(plan.name).state == "Failed"


@pytest.mark.parametrize(
    ("values", "key", "fix"),
    [
        ({"secrets": {"HF_TOKEN": "env"}}, "secrets.HF_TOKEN", "aws secretsmanager create-secret --name HF_TOKEN"),
        (
            {"secrets": {"HF_TOKEN": {"secretsmanager": "x"}}, "network": {"isolation": True}},
            "secrets",
            "isolation: false",
        ),
    ],
)
def test_secrets_that_cannot_reach_a_job_on_sagemaker_are_refused(sagemaker_job, monkeypatch, values, key, fix):
    monkeypatch.setenv("HF_TOKEN", VALUE)
    plan = launcher.plan(sagemaker_job("print(1)\n", **values), on="aws")
    assert any(issue.key == key and fix in issue.fix for issue in plan.errors)
    assert VALUE not in str(plan) + plan.to_json()


def test_a_sitecustomize_of_the_users_own_runs_after_the_secrets_are_read(sagemaker_job, stored):
    secrets = {"HF_TOKEN": {"secretsmanager": "plain"}}
    job = sagemaker_job("import sitecustomize\nprint('seen', sitecustomize.LENGTH, flush=True)\n", secrets=secrets)
    Path(job.source, "sitecustomize.py").write_text("import os\nLENGTH = len(os.environ['HF_TOKEN'])\n")
    run = started(job)
    assert run.wait(120) == "Completed", run.outcome()
    assert f"seen {len(VALUE)}" in [line for _, line in run.logs()] and holding(run) == []


def test_a_job_with_neither_secrets_nor_observer_has_its_own_sitecustomize_alone(sagemaker_job):
    job = sagemaker_job("print(1)\n", observe=False)
    Path(job.source, "sitecustomize.py").write_text("x = 1\n")
    [own] = [file for file in launcher.plan(job, on="aws").files if file.path.startswith("sitecustomize")]
    assert own.path == python_start.FILE and own.read() == b"x = 1\n"
