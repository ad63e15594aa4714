"""`launcher watch` of training commands: their steps are counted while they run, and explained at the end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.record.progress import RunProgress
from tests.conftest import wait_until
from tests.watch.commands import LAUNCHER, environment, the_run, typed, watched

BIN = Path(sys.executable).parent

TRAINS = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.randn(8), index % 2


def main():
    go = sys.argv[1:]
    del sys.argv[1:]
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Slow(), batch_size=4, num_workers=0)
    for epoch in range(6):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{epoch} loss: {loss.item():.4f}", flush=True)
        if go and epoch == 3:
            print("waits", flush=True)
            while not os.path.exists(go[0]):
                time.sleep(0.05)


main()
"""


@pytest.fixture
def script(tmp_path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(TRAINS)
    return file


@pytest.mark.slow
def test_a_script_is_followed_while_it_runs_and_its_slow_line_is_named(script, tmp_path):
    words = [*LAUNCHER, "watch", "--html", "why.html", "--", sys.executable, "train.py", str(tmp_path / "go")]
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=out, stderr=err, env=environment())
        wait_until(lambda: b"waits" in (tmp_path / "out").read_bytes(), 120, "four epochs")
        run = the_run()
        wait_until(lambda: any(line.get("observed") and "loss" in line for line in run.metrics()), what="its metrics")
        shown = re.search(r"progress    (.*)", typed("show", "train").stdout)
        assert shown is not None and re.match(r"epoch [1-4]  step \d+  \d+ of 16  loss ", shown[1])
        assert "images/s" in shown[1] and "steps/s" in shown[1] and shown[1].endswith("left of the epoch")
        (tmp_path / "go").touch()
        assert process.wait(60) == 0
    [record] = run.folder.path.rglob("timeline-0.jsonl")
    assert str(tmp_path / "go") not in record.read_text(), "arguments may hold a secret"
    [*_, last] = run.metrics()
    assert (last["step"], last["epoch"], last["epoch_step"], last["epoch_steps"]) == (96, 6, 16, 16)
    steps = [line["step"] for line in run.metrics()]
    assert steps == sorted(set(steps)) and any("loss" in line for line in run.metrics())
    said = (tmp_path / "err").read_text()
    assert f"launcher diagnose {run.name}" in said
    slow = re.search(r"^  1\. .+, at (train\.py:\d+) \(\d+ % of the time\)\n     advice: ", said, re.MULTILINE)
    assert slow is not None and slow[1] in (tmp_path / "why.html").read_text(), said


@pytest.mark.slow
def test_ranks_of_torchrun_behind_a_shell_script_are_followed(script, tmp_path):
    shell = tmp_path / "train.sh"
    shell.write_text(f"set -e\ncd {tmp_path}\n{BIN}/torchrun --standalone --nproc_per_node 2 train.py\n")
    found = watched("sh", shell)
    assert found.returncode == 0, found.stderr
    run = the_run()
    assert len(list(run.folder.path.rglob("timeline-*.jsonl"))) == 2
    assert run.metrics()[-1]["step"] == 96 and "2 processes" in str(run.diagnose())


SEVERAL = """
import os, sys, time
import torch
from torch.utils.data import DataLoader

steps = int(sys.argv[1])
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.randn(4 * steps, 8), batch_size=4):
    time.sleep(0.01)
    model(batch).mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_of_a_command_that_trains_several_times_the_longest_is_explained_and_progress_is_of_the_last(tmp_path):
    """As where torchrun starts a training anew, or a shell script trains fold after fold."""
    (tmp_path / "train.py").write_text(SEVERAL)
    python = f"{sys.executable} {tmp_path}/train.py"
    found = watched("sh", "-c", f"{python} 11; {python} 150; {python} 30")
    assert found.returncode == 0 and b"launcher observer" not in found.stderr
    run = the_run()
    assert "3 trainings were recorded: this is number 2, the longest (150 steps)" in str(run.diagnose())
    assert {line.get("attempt", 0): line["step"] for line in run.metrics()} == {0: 11, 1: 150, 2: 30}
    progress = RunProgress(run.folder)
    assert progress.read_observed(1.0) and progress.line().startswith("epoch 1  step 30  30 of 30")


def test_a_process_that_cannot_be_observed_is_told_from_one_that_is(tmp_path):
    found = watched(sys.executable, "-I", "-c", "print('trained')")
    assert found.stdout == b"trained\n" and b"-I, -E or -S" in found.stderr
