"""The same job in the docker backend's containers and in those of SageMaker's SDK v2: the script sees the same."""

from __future__ import annotations

import tarfile

import pytest

import launcher
from launcher.backends import docker
from tests.local_mode import sdk
from tests.local_mode.conftest import IMAGE, wait_for_state
from tests.local_mode.seen import SEEN, Seen, compare

OF_THE_BACKEND = {
    name: docker.Docker.DIFFERENCES[name]
    for name in (
        "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG", "AWS_EC2_METADATA_DISABLED", "GOMP_SPINCOUNT",
    )
}  # fmt: skip
"""What of the declared differences from SageMaker the SDK's containers do not share."""

OF_THE_SDK = {
    "AWS_ACCESS_KEY_ID": "the SDK gives its credentials to the containers",
    "AWS_SECRET_ACCESS_KEY": "with that",
    "AWS_ENDPOINT_URL_S3": "and where they are for",
    "AWS_REGION": "of a job without a region too",
    "MINE": "Compose puts the value of $HOME in its place",
    "TERM": "its containers have a terminal",
    "SM_CURRENT_INSTANCE_GROUP_HOSTS": "no groups in its resourceconfig.json; SageMaker names one for a homogeneous cluster, too",
    "SM_INSTANCE_GROUPS": "with that",
    "SM_INSTANCE_GROUPS_DICT": "with that",
    "SM_RESOURCE_CONFIG": "with that",
    "SM_INPUT_DATA_CONFIG": "a channel's mode alone, of all that SageMaker says of it",
}
"""What differs in the SDK's containers from the backend's, which are as SageMaker's there."""

MINE = "it's; $HOME"


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_sdks_local_mode_shows_a_script_what_the_backend_shows_it(engine, script_job, tmp_path, monkeypatch, hosts):
    monkeypatch.setattr(docker, "IMAGE", IMAGE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/image.txt").write_text("pixels")
    job = script_job(
        SEEN,
        inputs={"train": {"folder": str(tmp_path / "data")}},
        environment={"MINE": MINE},
        hyperparameters={"a": 1, "name": "it's", "table": {"x": [1, None]}, "none": None, "rate": 0.1, "deep": True},
        distribution="torchrun" if hosts == 2 else "none",
        compute={"instance_count": hosts, "processes_per_host": 2 if hosts == 2 else None},
    )
    plan = launcher.plan(job, on="docker")
    run = launcher.run(plan)
    wait_for_state(run, "Completed", 150)
    root = tmp_path / "sdk"
    sdk.run(plan, run.folder.code, root)
    for rank in range(2 * hosts) if hosts == 2 else [0]:
        compare(Seen(run.folder.path, run.name, rank), Seen(root, plan.name, rank), OF_THE_BACKEND, OF_THE_SDK)
        assert Seen(run.folder.path, run.name, rank).environment["MINE"] == MINE
    for archive in (run.folder.model, root / "model.tar.gz"):
        with tarfile.open(archive) as model:
            assert [name for name in model.getnames() if name != "."] == ["weights"]
