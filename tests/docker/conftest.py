"""What the tests of the images share. They need a Docker engine and the built image, so `make test-docker` runs them.

make image && LAUNCHER_TEST_DOCKER=1 .venv/bin/python -m pytest tests/docker
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import launcher
from launcher.backends import host_folders
from launcher.planner.source_package import copy_files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOCAL = os.environ.get("IMAGE", "vision-launcher-local")

AWS_LIKE = f"""
FROM {LOCAL}
RUN pip uninstall --quiet --yes timm safetensors && rm -r /opt/vision-launcher
COPY start_with_right_hostname.sh /usr/local/bin/
ENTRYPOINT ["bash", "-m", "start_with_right_hostname.sh"]
CMD ["/bin/bash"]
"""
"""What AWS's images have in common, where this kit meets it: no timm, and a start script that keeps the SIGTERM."""

AWS_START = """
if [[ "$1" = "train" ]]; then
    train
else
    eval "$@"
fi
"""


@pytest.fixture(scope="session")
def local_image() -> str:
    """The image that `make image` builds; without it these tests fail, they do not skip."""
    try:
        engine = docker("version", "--format", "{{.Server.Version}}", check=False)
    except FileNotFoundError:
        pytest.fail("there is no docker command: install Docker, then make image", pytrace=False)
    if engine.returncode:
        pytest.fail(f"no Docker engine answers; start it. docker version says: {engine.stderr}", pytrace=False)
    if docker("image", "inspect", LOCAL, check=False).returncode:
        pytest.fail(f"there is no image {LOCAL}: make image", pytrace=False)
    return LOCAL


@pytest.fixture(scope="session")
def aws_like_image(local_image, tmp_path_factory) -> str:
    """A stand-in for a Deep Learning Container."""
    folder = tmp_path_factory.mktemp("aws-like")
    (folder / "Dockerfile").write_text(AWS_LIKE)
    (folder / "start_with_right_hostname.sh").write_text(AWS_START)
    name = f"vision-launcher-test-aws-like-{os.getpid()}"
    docker("build", "--force-rm", "--network", "none", "--tag", name, str(folder))
    yield name
    docker("image", "rm", "--force", name)


@pytest.fixture(scope="session")
def training_image(local_image) -> str:
    """The training image on the local image, which has all that it adds."""
    yield from build_training(local_image, f"vision-launcher-test-training-{os.getpid()}")


@pytest.fixture(scope="session")
def training_image_on_aws_like(aws_like_image) -> str:
    """The training image on the stand-in for AWS's."""
    yield from build_training(aws_like_image, f"vision-launcher-test-training-aws-{os.getpid()}")


@pytest.fixture(params=["local_image", "training_image", "training_image_on_aws_like"])
def image(request) -> str:
    """Each of the images that this kit builds."""
    return request.getfixturevalue(request.param)


def build_training(base: str, name: str):
    """`make image-training` on another base, for the time of the tests."""
    docker_build("training", TRAINING_BASE=base, TRAINING_IMAGE=name)
    yield name
    docker("image", "rm", "--force", name)


def docker_build(kind: str, **variables: str) -> str:
    """Run docker/build; what it said."""
    command, environment = [str(ROOT / "docker/build"), kind], {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run the docker command."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if check:
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done


class Container:
    """A training job's only host, with its /opt/ml in a folder here and no network, as far as Docker goes."""

    def __init__(self, image: str, plan: launcher.Plan, folder: Path, *options: str):
        self.opt_ml = folder
        for place in ("code", "model", "output/data", "input/data", "input/config", "checkpoints"):
            (folder / place).mkdir(parents=True)
        copy_files(list(plan.files), folder / "code")
        for name, text in host_folders.config_files(plan, plan.hosts[0]).items():
            (folder / "input/config" / name).write_text(text)
        mounts = [
            f"--volume={folder / place}:/opt/ml/{place}"
            for place in ("code", "model", "output", "input", "checkpoints")
        ]
        mounts += [f"--volume={place}:/opt/ml/input/data/{name}:ro" for name, place in plan.channels.items()]
        for place in (*plan.channels, "."):
            (folder / "input/data" / place).mkdir(exist_ok=True)
        for place in (folder, *folder.rglob("*")):
            place.chmod(0o777)  # whoever the container runs as
        started = docker("run", "--detach", "--network=none", *mounts, *options, image, "train")
        self.id = started.stdout.strip()

    def wait(self) -> int:
        """The exit code, once it has one."""
        return int(docker("wait", self.id).stdout)

    def log(self) -> str:
        """Both streams."""
        done = docker("logs", self.id)
        return done.stdout + done.stderr

    def stop(self, seconds: int) -> int:
        """SIGTERM, SIGKILL after so many seconds; the exit code."""
        docker("stop", "--time", str(seconds), self.id)
        return self.wait()

    def first_process_takes_sigterm(self) -> bool:
        """Whether PID 1 is the image's own program, no longer Docker's, with a handler for it; without one the kernel drops it."""
        pid = docker("inspect", "--format", "{{.State.Pid}}", self.id).stdout.strip()
        if b"/opt/vision-launcher/" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
        [caught] = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def wait_for(self, file: str, seconds: float = 90) -> None:
        """Until the script has left a file below /opt/ml."""
        end = time.monotonic() + seconds
        while not (self.opt_ml / file).exists():
            assert time.monotonic() < end, f"after {seconds} s still no {file}; the log:\n{self.log()}"
            time.sleep(0.1)


@pytest.fixture
def run_container(tmp_path):
    """Starts a job's container: `run_container(image, job, *docker_options)`; afterwards it is gone."""
    containers = []

    def start(image: str, job: launcher.Job, *options: str) -> Container:
        plan = launcher.plan(job)
        assert not plan.errors, plan.errors
        containers.append(Container(image, plan, tmp_path / f"host-{len(containers)}", *options))
        return containers[-1]

    yield start
    for container in containers:
        docker("rm", "--force", container.id)
