"""Uploads before a job: the code goes to S3 as it was recorded, and nothing after Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tarfile
import threading

import boto3
import pytest

import launcher
from launcher.aws import session, upload
from tests.aws.conftest import BUCKET, REGION, replacing

KEY = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
"""As a token of GitHub's looks."""


@pytest.fixture
def plan(sagemaker_job, data) -> launcher.Plan:
    job = sagemaker_job("print('as planned')\n", inputs={"train": {"folder": str(data)}})
    return launcher.plan(job, on="aws")


def uploaded_script(plan: launcher.Plan) -> str:
    [code] = [key for key in keys(f"runs/{plan.name}/") if key.endswith("sourcedir.tar.gz")]
    body = boto3.client("s3", region_name=REGION).get_object(Bucket=BUCKET, Key=code)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        return archive.extractfile("script.py").read().decode()


def keys(prefix: str) -> list[str]:
    answer = boto3.client("s3", region_name=REGION).list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [item["Key"] for item in answer.get("Contents", ())]


def edited_during_the_upload_of_data(plan, monkeypatch) -> None:
    """Let the script change, and a key appear in it, while the first file of the data is sent."""
    upload_file = session.client("s3", REGION).upload_file

    def edited(*what, **options) -> None:
        (plan.source / "script.py").write_text(f"print('edited', '{KEY}')\n")
        upload_file(*what, **options)

    monkeypatch.setattr(session, "client", replacing("s3", upload_file=edited))


@pytest.mark.parametrize(
    ("times", "is_read"),
    [
        ({"a.txt": 1, "b ü.txt": 1_700_000_000}, True),
        ({"a.txt": 1_700_000_000, "b ü.txt": 1_700_000_000}, True),
        ({"a.txt": 900_000_000}, True),
        ({"a.txt": 900_000_000.5}, False),
        ({"a.txt": 1_700_000_000, "b ü.txt": 1_700_000_001}, False),
    ],
    ids=["Nix", "SOURCE_DATE_EPOCH", "one file's SOURCE_DATE_EPOCH", "one file's own time", "own times"],
)
def test_a_changed_file_whose_time_a_tool_has_normalised_is_uploaded_again(sagemaker_job, data, times, is_read):
    """Where files have times of their own, a plan reads none of them."""

    def target(text: str) -> str:
        (data / "a.txt").write_text(text)
        for name, seconds in times.items():
            os.utime(data / name, ns=(int(seconds * 1e9),) * 2)
        place = data if len(times) > 1 else data / "a.txt"
        return upload.planned_upload(sagemaker_job("print(1)"), "train", place).target

    assert (target("one") != target("two")) == is_read
    assert target("one") == target("one")


def test_code_that_is_edited_while_data_is_uploaded_runs_as_it_was_recorded(plan, monkeypatch):
    edited_during_the_upload_of_data(plan, monkeypatch)
    run = launcher.run(plan)
    assert "edited" in (plan.source / "script.py").read_text()
    assert uploaded_script(plan) == (run.folder.code / "script.py").read_text() == "print('as planned')\n"
    assert run.wait(120) == "Completed"
    assert "as planned" in [line for _, line in run.logs()]


def test_a_key_that_is_typed_between_plan_and_run_is_not_uploaded(plan):
    (plan.source / "script.py").write_text(f"print('{KEY}')\n")
    with pytest.raises(launcher.UserError, match=r"source: script.py:1: looks like .*, which would be uploaded"):
        launcher.run(plan)
    run = launcher.attach(plan.name)
    assert run.state == "Failed" and "not started" in run.outcome()["failure"]
    assert keys(f"runs/{plan.name}/") == []


def test_an_upload_without_a_run_packs_the_code_before_the_data(plan, monkeypatch):
    edited_during_the_upload_of_data(plan, monkeypatch)
    launcher.upload(plan)
    assert uploaded_script(plan) == "print('as planned')\n"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda file: file.write_text("print('edited')\n"), "the code in .* has changed since it was planned"),
        (lambda file: file.unlink(), "script.py: No such file or directory; it was there when planned"),
    ],
    ids=["edited", "removed"],
)
def test_an_upload_without_a_run_refuses_other_code_than_was_planned(plan, change, found):
    change(plan.source / "script.py")
    with pytest.raises(launcher.UserError, match=f"{found}\n(.*\n)?.*plan again"):
        launcher.upload(plan)
    assert keys(f"runs/{plan.name}/") == [] and keys(plan.uploads[0].target.partition(f"{BUCKET}/")[2]) == []


@pytest.mark.parametrize("size", [2**20, 20 * 2**20], ids=["in one request", "in parts"])
def test_ctrl_c_ends_the_uploads_that_are_under_way(sagemaker_job, data, interrupt, size):
    """Else Python waits at its exit until up to 8 files have been sent, however large they are."""
    for name in data.iterdir():
        os.truncate(name, size)
    plan = launcher.plan(sagemaker_job("", inputs={"train": {"folder": str(data)}}), on="aws")
    interrupts, has_ended, before = [signal.SIGINT], threading.Event(), {*threading.enumerate()}

    def send(**_) -> None:
        """A request with a file's bytes waits until Ctrl-C has ended the upload."""
        with contextlib.suppress(IndexError):  # one interrupt is enough
            signal.pthread_kill(threading.main_thread().ident, interrupts.pop())
        has_ended.wait(60)

    for operation in ("PutObject", "UploadPart"):
        session.client("s3", REGION).meta.events.register(f"before-send.s3.{operation}", send)
    with pytest.raises(KeyboardInterrupt):
        launcher.upload(plan)
    has_ended.set()
    for thread in {*threading.enumerate()} - before:
        if (
            thread.name.startswith("ThreadPoolExecutor") and thread.is_alive()
        ):  # the interrupt may come before one has started
            thread.join(60)
            assert not thread.is_alive()
    prefix = plan.uploads[0].target.partition(f"{BUCKET}/")[2]
    assert keys(prefix) == []
    parts = boto3.client("s3", region_name=REGION).list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    assert parts.get("Uploads", []) == []
