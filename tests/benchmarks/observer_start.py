"""What the observer adds to the start of a Python process: `python -c pass` in a job with and without it, in turn. `make bench-insight`.

In a job, another process keeps the host's monitor running; the first process of a host starts it, and is measured separately. The
backends set PYTHONDONTWRITEBYTECODE, so Python compiles the observer's files anew each time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from launcher.planner.python_start import with_python_start  # noqa: E402
from launcher.planner.source_package import copy_files  # noqa: E402


def milliseconds(environ: dict[str, str]) -> float:
    """Of one process that does nothing."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environ, check=True)
    return 1000 * (time.perf_counter() - began)


def job(folder: Path, name: str, plain: dict[str, str]) -> dict[str, str]:
    """Variables of an observed job's processes."""
    output = folder / name
    output.mkdir()
    return {**plain, "PYTHONPATH": str(folder / "code"), "SM_OUTPUT_DATA_DIR": str(output)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    asked = parser.parse_args()
    print(f"this machine, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; {asked.rounds} rounds\n")
    print("| bytecode | ms without | ms more | ms more for a host's first |")
    print("| -------- | ---------: | ------: | -------------------------: |")
    for bytecode in ("not written", "written"):
        without = "" if bytecode == "written" else "1"
        plain = {**os.environ, "PYTHONDONTWRITEBYTECODE": without}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_files(with_python_start([], observe=True, secrets={}), folder / "code")
            rounds = range(asked.rounds)
            first = [milliseconds(job(folder, f"host-{number}", plain)) - milliseconds(plain) for number in rounds]
            observed = job(folder, "kept", plain)
            with subprocess.Popen([sys.executable, "-c", "input()"], env=observed, stdin=subprocess.PIPE) as keeper:
                time.sleep(1)  # the monitor's own start
                pairs = [(milliseconds(plain), milliseconds(observed)) for _ in rounds]
                keeper.communicate(b"\n")
        alone = statistics.median(theirs for theirs, _ in pairs)
        more = statistics.median(ours - theirs for theirs, ours in pairs)
        print(f"| {bytecode} | {alone:.1f} | {more:.1f} | {statistics.median(first):.1f} |", flush=True)


if __name__ == "__main__":
    main()
