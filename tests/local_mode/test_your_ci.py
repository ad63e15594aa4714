"""The documents' job for the CI of a user's repository, step by step, with a real engine; the checkouts are copies."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap

import pytest
import yaml

from tests.conftest import ROOT
from tests.docs.documents import the_block

TRAIN = """
    import os, pathlib, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    print(f"{int(total)} ranks on {os.environ['SM_HOSTS']}", flush=True)
    dist.destroy_process_group()
"""

CONFIG = """
name: mine
source: source
script: train.py
distribution: torchrun
compute: {instance_type: ml.g5.48xlarge, instance_count: 8}
smoke: {compute: {instance_count: 1}}
"""


@pytest.mark.timeout(1200)  # it installs packages
def test_the_documents_job_runs_a_users_config_on_two_hosts_in_containers(engine, tmp_path):
    tracked = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for path in filter(None, subprocess.run(tracked, capture_output=True, text=True, check=True).stdout.split("\0")):
        copy = tmp_path / "vision-launcher" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "train.yaml").write_text(CONFIG)
    [job] = yaml.safe_load(the_block("yaml", "# .github/workflows/training-job.yml"))["jobs"].values()
    paths = tmp_path / "paths"
    paths.touch()
    # as on a runner, but for the index of PyTorch's CPU builds: the image that is there was built without it
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("LAUNCHER_", "VIRTUAL_ENV"))
    }
    for step in job["steps"]:
        if "run" in step:
            path = os.pathsep.join([*paths.read_text().split(), os.environ["PATH"]])
            done = subprocess.run(
                ["bash", "-e", "-c", step["run"]],
                cwd=tmp_path,
                env={**environment, "GITHUB_PATH": str(paths), "PATH": path},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{step['run']}\n{done.stdout}\n{done.stderr}"
    assert '2 ranks on ["algo-1","algo-2"]' in done.stdout and "Completed" in done.stdout
