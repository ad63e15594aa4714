"""PID 1 of the training image: starts `train` as AWS's image does, and brings it the SIGTERM that AWS's start script keeps.

AWS's images start `bash -m start_with_right_hostname.sh train`. That script sets up CUDA and the host's name and then runs `train`
as its child; a shell as PID 1 takes no SIGTERM and passes none on, so a stopped job or an interrupted spot host never hears of it.
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
        os.execvp(command[0], command)  # a shell, or a base without AWS's script: `train` is PID 1 and hears for itself
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    threading.Thread(target=tell_the_shim, daemon=True).start()
    sys.exit(wait_for(subprocess.Popen(command).pid))


stopping = threading.Event()


def tell_the_shim() -> None:
    """After SIGTERM, send it to the toolkit's shim, as soon as that runs."""
    import psutil

    stopping.wait()
    while True:
        for process in psutil.Process().children(recursive=True):
            try:
                if SHIM in process.cmdline():
                    process.terminate()
                    return
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.1)


def wait_for(pid: int) -> int:
    """The exit code of a child; other children that end meanwhile are orphans that came to PID 1, and are let go."""
    ended = status = None
    while ended != pid:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code  # as a shell says it


if __name__ == "__main__":
    main()
