"""PID 1 of the training image: starts `train` as AWS's image does, and forwards SIGTERM, which AWS's start script does not.

AWS's images start `bash -m start_with_right_hostname.sh train`. That script sets up CUDA and the host's name and then runs `train`
as its child. A shell as PID 1 ignores SIGTERM, so a stopped job or an interrupted spot host would get no signal.
https://github.com/aws/deep-learning-containers/blob/master/scripts/docker/pytorch/start_with_right_hostname.sh
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

AWS_START = "start_with_right_hostname.sh"
SHIM = "/opt/vision-launcher/toolkit.py"


def main() -> None:
    command = sys.argv[1:] or ["train"]
    script = shutil.which(AWS_START)
    if script is not None:
        command = ["bash", "-m", script, *command]
    if script is None or sys.argv[1:] not in ([], ["train"]):
        os.execvp(command[0], command)  # a shell, or a base without AWS's script: the command becomes PID 1
    threading.Thread(target=forward_sigterm, args=(caught_signals(),), daemon=True).start()
    sys.exit(wait_for(subprocess.Popen(command).pid))


def caught_signals() -> int:
    """As in the toolkit's shim: a pipe's read end that gets a signal's number even while the main thread waits for a child."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return reading


def forward_sigterm(signals: int) -> None:
    """After SIGTERM, send it to the toolkit's shim once that takes it."""
    import psutil

    while os.read(signals, 1) != bytes([signal.SIGTERM]):
        continue
    while True:
        for process in psutil.Process().children(recursive=True):
            try:
                if SHIM in process.cmdline() and takes_sigterm(process.pid):
                    process.terminate()
                    return
            except (psutil.NoSuchProcess, FileNotFoundError):
                continue
        time.sleep(0.1)


def takes_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, which would kill it otherwise.

    https://man7.org/linux/man-pages/man5/proc_pid_status.5.html
    """
    with open(f"/proc/{pid}/status") as status:
        [caught] = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def wait_for(pid: int) -> int:
    """The exit code of a child. Other children are orphans, which are reaped."""
    ended = status = None
    while ended != pid:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code  # as in a shell


if __name__ == "__main__":
    main()
