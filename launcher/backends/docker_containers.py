"""The containers of a run: each as a process is seen, and how nothing of them stays behind.

    python docker_containers.py RUN

waits until its standard input ends, then removes every container and network of that run. The supervisor keeps the other end of
that pipe, so it happens however the supervisor ends. It runs by its path and imports nothing else of this kit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO

RUN_LABEL, FOLDER_LABEL = "vision-launcher.run", "vision-launcher.folder"
"""What every container and network of a run carries: its name, and its folder on this machine."""


class Container:
    """One host's container. Its attached client ends with it, and writes its log; the rest is as subprocess.Popen has it."""

    def __init__(self, name: str, log: IO[bytes]):
        """Start the container of that name.

        Args:
            log: gets its standard output and error, and what the client says where it cannot start.
        """
        self.name = name
        self.returncode: int | None = None
        self.trouble = ""
        """Why the engine could not start it or had to end it; "" where it ran and ended by itself."""
        self.client = subprocess.Popen(
            ["docker", "start", "--attach", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """None while it runs; then its exit code, negative for the signal that killed it."""
        if self.returncode is None and self.client.poll() is not None:
            self.returncode = self._end()
        return self.returncode

    def wait(self) -> int:
        self.client.wait()
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """To its first process, the shim. One that has ended meanwhile gets none."""
        subprocess.run(["docker", "kill", f"--signal={int(number)}", self.name], capture_output=True)

    def kill(self) -> None:
        """End it, whatever state it is in; one that still starts, too."""
        subprocess.run(["docker", "kill", self.name], capture_output=True)
        try:
            self.client.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.client.kill()

    def _end(self) -> int:
        """The exit code, and what the engine says of the end."""
        answer = subprocess.run(
            ["docker", "container", "inspect", "--format", "{{json .State}}", self.name], capture_output=True, text=True
        )
        if answer.returncode:
            self.trouble = f"the container is gone: {answer.stderr.strip()}"
            return self.client.returncode or 1
        state = json.loads(answer.stdout)
        if state["Running"]:
            self.trouble = "the docker client lost the container, which was then ended"
            subprocess.run(["docker", "kill", self.name], capture_output=True)
            return self.client.returncode or 1
        if state["Error"]:
            self.trouble = f"the container did not start: {state['Error']}"
        elif state["OOMKilled"]:
            self.trouble = "the container was killed because memory ran out"
        code = state["ExitCode"] or (self.client.returncode if state["Status"] == "created" else 0)
        return 128 - code if code > 128 else code


def janitor(run: str) -> subprocess.Popen[bytes]:
    """Start the process that removes a run's containers and networks when its standard input is closed, or this process ends."""
    return subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__)), run], stdin=subprocess.PIPE, start_new_session=True
    )


def remove(run: str) -> None:
    """Remove every container and network of a run; those that run are killed."""
    label = f"label={RUN_LABEL}={run}"
    containers = _listed("ps", "--all", "--quiet", "--no-trunc", "--filter", label)
    if containers:
        subprocess.run(["docker", "rm", "--force", "--volumes", *containers], stdout=subprocess.DEVNULL)
    networks = _listed("network", "ls", "--quiet", "--no-trunc", "--filter", label)
    if networks:
        subprocess.run(["docker", "network", "rm", *networks], stdout=subprocess.DEVNULL)


def runs() -> dict[str, Path]:
    """The runs that have a container or a network on this engine, with the folder of each."""
    form = f'{{{{.Label "{RUN_LABEL}"}}}}\t{{{{.Label "{FOLDER_LABEL}"}}}}'
    lines = _listed("ps", "--all", "--filter", f"label={RUN_LABEL}", "--format", form)
    lines += _listed("network", "ls", "--filter", f"label={RUN_LABEL}", "--format", form)
    pairs = (line.partition("\t") for line in lines)
    return {run: Path(folder) for run, _, folder in pairs if run and folder}


def _listed(*command: str) -> list[str]:
    return subprocess.run(["docker", *command], capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    sys.stdin.buffer.read()
    remove(sys.argv[1])


if __name__ == "__main__":
    main()
