"""A run's containers, with the interface of processes, and how they are removed.

    python docker_containers.py RUN

waits for the end of its standard input, then removes every container and network of the run. The supervisor holds the pipe, so
this happens however the supervisor ends. The file runs by its path and imports nothing else of this kit.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

RUN_LABEL, FOLDER_LABEL = "vision-launcher.run", "vision-launcher.folder"
"""Labels of a run's containers and networks: its name, and its folder on this machine."""


class Container:
    """One host's container, with the interface of subprocess.Popen. An attached client writes the log and ends with the container."""

    def __init__(self, name: str, log: IO[bytes]):
        """Start the container of that name.

        Args:
            log: gets its standard output and error, and the client's own errors.
        """
        self.name = name
        self.returncode: int | None = None
        self.trouble = ""
        """Why the engine did not start it, or killed it or one of its processes; "": it ended by itself."""
        self.client = subprocess.Popen(
            ["docker", "start", "--attach", name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """None while it runs; then its exit code, negative for a signal."""
        if self.returncode is None and self.client.poll() is not None:
            self.returncode = self._end()
        return self.returncode

    def wait(self) -> int:
        self.client.wait()
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to its first process, the shim."""
        subprocess.run(["docker", "kill", f"--signal={int(number)}", self.name], capture_output=True)

    def kill(self) -> None:
        """Kill it in any state, also while it starts."""
        subprocess.run(["docker", "kill", self.name], capture_output=True)
        try:
            self.client.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.client.kill()

    def _end(self) -> int:
        """The exit code. Sets `trouble` from the engine's state."""
        answer = subprocess.run(
            ["docker", "container", "inspect", "--format", "{{json .State}}", self.name], capture_output=True, text=True
        )
        if answer.returncode:
            self.trouble = f"the container is gone: {answer.stderr.strip()}"
            return self.client.returncode or 1
        state = json.loads(answer.stdout)
        if state["Running"]:
            self.trouble = "the docker client lost the container, which was then killed"
            subprocess.run(["docker", "kill", self.name], capture_output=True)
            return self.client.returncode or 1
        if state["Error"]:
            self.trouble = f"the container did not start: {state['Error']}"
        elif state["OOMKilled"]:
            self.trouble = "a process was killed: the host reached its limit of memory; raise compute.memory_gb"
        code = state["ExitCode"] or (self.client.returncode if state["Status"] == "created" else 0)
        return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code  # a shell's convention for signals


def janitor(run: str) -> subprocess.Popen[bytes]:
    """Start the process that removes a run's containers and networks once its standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__)), run], stdin=subprocess.PIPE, start_new_session=True
    )


def remove(run: str) -> None:
    """Remove every container and network of a run, even running ones."""
    label = f"label={RUN_LABEL}={run}"
    containers = _listed("ps", "--all", "--quiet", "--no-trunc", "--filter", label)
    if containers:
        subprocess.run(["docker", "rm", "--force", "--volumes", *containers], stdout=subprocess.DEVNULL)
    networks = _listed("network", "ls", "--quiet", "--no-trunc", "--filter", label)
    if networks:
        subprocess.run(["docker", "network", "rm", *networks], stdout=subprocess.DEVNULL)


def runs() -> dict[str, Path]:
    """Run -> folder, for the runs with a container or a network on this engine."""
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
