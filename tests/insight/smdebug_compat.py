"""smdebug's own readers and analyses open what our monitor wrote, and find in it what we find. `make compat-smdebug`

The monitor samples this machine for some seconds, and its writer adds three more minutes of made-up samples of two hosts, with
GPUs. Then smdebug, in an environment of its own, reads the folder with LocalSystemMetricsReader, PandasFrame and the data of its
heat map, and the counts and sums of every series are compared with those of `launcher.insight`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "entrypoints")]

from launcher_observer.system.monitor import Writer, system_monitor  # noqa: E402

from launcher.insight import system_files  # noqa: E402

SECONDS = 6
"""For which the monitor really samples."""

OTHER_SIDE = """
import json, sys, time
from smdebug.profiler.analysis.notebook_utils.heatmap import Heatmap
from smdebug.profiler.analysis.utils.profiler_data_to_pandas import PandasFrame
from smdebug.profiler.system_metrics_reader import LocalSystemMetricsReader

reader = LocalSystemMetricsReader(sys.argv[1])
events = reader.get_events(0, int(time.time() + 3600) * 1_000_000)
series = {}
for event in events:
    key = "|".join((event.node_id, event.type, event.name, event.dimension))
    found = series.setdefault(key, [0, 0.0, 0.0])
    series[key] = [found[0] + 1, found[1] + event.value, found[2] + event.timestamp]

frame = PandasFrame(sys.argv[1], scan_interval=50000000000)
rows = frame.get_all_system_metrics()

heat = Heatmap.__new__(Heatmap)  # its constructor draws into a notebook
heat.select_metrics, heat.select_dimensions, heat.select_events = [], [".*CPU", ".*GPU"], [".*"]
heat.show_workers, heat.available_dimensions, heat.available_events = True, [], []
prepared = heat.preprocess_system_metrics(events, {})
print(json.dumps({"series": series, "events": len(events), "rows": len(rows), "types": sorted(set(rows["type"])),
                  "heat": sorted(prepared), "width": int(heat.width)}))
"""


def write(folder: Path) -> None:
    """Real samples of this machine, and made-up ones of two hosts with GPUs in the minutes before."""
    begin = time.time() // 60 * 60 - 240
    for number in (1, 2):
        writer = Writer(folder / "profiler-output", f"algo-{number}")
        for sample in range(360):
            share = sample / 3.6
            values = {
                ("cpu", "cpu0", "CPUUtilization"): 100.0,
                ("cpu", "cpu0", "I/OWaitPercentage"): 0.0,
                ("gpu", "gpu0", "GPUUtilization"): share,
                ("gpu", "gpu0", "GPUMemoryUtilization"): 100 - share,
                ("memory", "MemoryUsedPercent", ""): share,
                ("network", "ReceiveBytesPerSecond", "Algorithm"): 1e9 * share,
            }
            writer.write(begin + sample / 2, values)
    with system_monitor(folder, 0):
        time.sleep(SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of the environment that has smdebug")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
        root = f"{temporary}/profiler-output"
        ours = system_files.read(system_files.below([Path(root)]))
        command = [options.python, "-W", "ignore", "-c", OTHER_SIDE, root]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"smdebug could not read it:\n{done.stdout}{done.stderr}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    wrong, total = [], 0
    for host, series in ours.series.items():
        for key, (times, values) in series.items():
            count, value, when = theirs["series"].pop("|".join((host, *key)), (0, 0.0, 0.0))
            total += len(times)
            if count != len(times) or not math.isclose(value, values.sum()) or not math.isclose(when, times.sum()):
                wrong.append(f"{host} {key}: {len(times)} here, {count} there")
    wrong += [f"{key}: not here" for key in theirs["series"]]
    if wrong or theirs["events"] != total or ours.unreadable:
        raise SystemExit("\n".join([f"{total} events here, {theirs['events']} there", *wrong]))
    print(
        f"smdebug read all {total:,} events of {sum(map(len, ours.series.values()))} series as we do; its table has "
        f"{theirs['rows']:,} rows with {', '.join(theirs['types'])}, its heat map {theirs['width']} samples of {', '.join(theirs['heat'])}"
    )


if __name__ == "__main__":
    main()
