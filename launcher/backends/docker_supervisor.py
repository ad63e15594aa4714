"""The supervisor of a run in containers.

python -m launcher.backends.docker_supervisor RUN_FOLDER [--lifeline FD]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import traceback
from pathlib import Path

from launcher.backends import compose, docker, host_folders, supervision, supervisor
from launcher.backends.docker_containers import Container, janitor
from launcher.record import records


class DockerSupervisor(supervisor.Supervisor):
    """Runs a plan in containers, from start to outcome."""

    def __init__(self, folder: records.RunFolder, lifeline: int | None):
        super().__init__(folder, lifeline)
        self.engine = folder.read(docker.engine_file(folder))
        self.janitor = janitor(self.plan.name)
        self.containers: dict[str, Container] = {}
        """The values of `shims`, with their `trouble`."""

    def start_hosts(self) -> None:
        """Create network and containers with Compose, then start each container with its log."""
        command = [*self.engine["compose"], "--project-name", compose.project(self.plan.name)]
        command += ["--project-directory", str(self.folder.path), "--file", str(self.folder.path / compose.FILE)]
        environment = {**os.environ, **json.loads(os.environ.get(supervision.SECRETS, "{}"))}
        assert self.janitor.stdin is not None
        composed = subprocess.run(
            [*command, "up", "--no-start", "--no-build"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[self.janitor.stdin.fileno()],  # the janitor waits until Compose has ended
        )
        print(composed.stdout, flush=True)
        if composed.returncode:
            raise RuntimeError(docker.explain(composed.stdout))
        for host in self.plan.hosts:
            with open(self.folder.log(host.name), "wb") as log:
                made = Container(compose.container(self.plan.name, host.name), log)
            self.containers[host.name] = self.shims[host.name] = made

    def end_hosts(self) -> None:
        """Kill what still runs, remove containers and network, and link the channels in the hosts' folders."""
        running = [shim for shim in self.shims.values() if shim.poll() is None]
        for shim in running:
            shim.kill()
            shim.wait()
        for name, shim in self.containers.items():
            failure = self.folder.host(name) / "output/failure"
            if shim.trouble:
                known = failure.read_text(encoding="utf-8", errors="replace") + "\n" if failure.exists() else ""
                failure.write_text(known + shim.trouble, encoding="utf-8")
        self.janitor.communicate()  # closes its standard input, and waits for it
        try:
            self.show_channels()
        except OSError:  # a missing link must not cost the record
            traceback.print_exc()

    def show_channels(self) -> None:
        """Replace the empty mount points by links to the data."""
        for host in self.plan.hosts:
            for channel, place in self.plan.channels_of(host).items():
                point = self.folder.host(host.name) / "input/data" / channel
                shutil.rmtree(point)
                host_folders.show_channel(point, Path(place))


if __name__ == "__main__":
    supervisor.main(DockerSupervisor)
