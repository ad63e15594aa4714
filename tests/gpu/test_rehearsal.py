"""The GPU suite on a machine without a GPU: its checks at toy sizes, its page, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import ROOT, __main__, outcomes, page, suite
from tests.gpu.bench import TINY, Bench, seconds_per_step
from tests.gpu.outcomes import NotChecked, Outcome, Result
from tests.gpu.suite import Check
from tests.gpu.turns import in_turns

HIDDEN = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | {
    "CUDA_VISIBLE_DEVICES": ""
}
"""No GPU, and no outer `make`: one that `make test` started would also say which folder it enters."""

SAME_LINES = (
    "throughput-36-compiled",
    *(f"throughput-256-{mode}" for mode in ("eager", "compiled", "reduce-overhead")),
    *(f"throughput-{kind}-256" for kind in ("streams", "fp8")),
    *(check.name for check in suite.CHECKS if check.item == 12 and check.name != "augmentation-resnet18-4"),
)
"""Checks whose lines are all run by another check."""

MACHINE: dict[str, Any] = {
    "packages": {},
    "commit": "abc",
    "date": "today",
    "command": "make gpu",
    "device": "a GPU",
    "beside": False,
}
"""What an outcome says about where it was found."""

ELSEWHERE = ("needs a GPU", "nvidia.dali is not installed")
"""Why a check may not run in a rehearsal."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ("scripts",),
        ("host", "input", "augmentation-resnet18"),
        ("kernels", "throughput-36", "throughput-256", "journey"),
        ("throughput-settings", "throughput-streams", "throughput-fp8"),
    ],
)
def test_every_check_runs_at_toy_sizes_up_to_its_first_line_for_a_gpu(parts, tmp_path):
    wanted = [check.name for check in suite.CHECKS if check.part in parts and check.name not in SAME_LINES]
    command = [sys.executable, "-m", "tests.gpu", *parts, "--rehearse", "--results", str(tmp_path)]
    done = subprocess.run(
        [*command, *(word for name in wanted for word in ("--only", name))],
        cwd=ROOT,
        env=HIDDEN,
        capture_output=True,
        text=True,
    )
    found = outcomes.read(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {*found} == {*wanted}
    for outcome in found.values():
        assert outcome.status == "passed" or outcome.reason.endswith(ELSEWHERE), outcome
    text = (tmp_path / "gpu.md").read_text()
    assert "A rehearsal on the CPU" in text and str(ROOT) not in text
    for check in suite.CHECKS:
        said = f"- {check.title}. **" if check.table else f"### {check.title}\n"
        assert (said in text) == (check.name in found) != (f"- {check.title}: `python" in text)
    for columns in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") - line.count("\\|") for line in columns.splitlines()}) == 1, columns


NO_GPU = r"no GPU here: torch \S+ finds no CUDA device, and every check of the GPU suite needs one\n"


def test_without_a_gpu_make_gpu_says_so_in_a_line_and_fails():
    command = ["make", "gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=HIDDEN, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(NO_GPU, done.stdout)


def test_without_a_gpu_make_gpu_if_any_says_so_in_a_line_and_ends_well(monkeypatch, capsys):
    command = ["make", "--dry-run", "gpu-if-any", f"PYTHON={sys.executable}"]
    planned = subprocess.run(command, cwd=ROOT, env=HIDDEN, capture_output=True, text=True, check=True)
    _, *words = shlex.split(planned.stdout)
    assert words[:2] == ["-m", "tests.gpu"]
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert __main__.main() == 0
    assert re.fullmatch(NO_GPU, capsys.readouterr().out)


def test_a_check_that_fails_leaves_the_others_and_is_on_the_page(tmp_path, monkeypatch):
    names = ("holding", "not_holding", "raising", "crashing", "hanging", "stuck", "elsewhere")
    seconds = {"hanging": 8.0, "stuck": 3.0}
    monkeypatch.setattr(suite, "NEARLY", 0.8)  # the rest is for the first to tell where it was, also on a busy machine
    checks = [
        Check(name, 1, "host", f"A check: {name}", f"test_rehearsal:{name}", seconds=seconds.get(name, 60.0))
        for name in names
    ]
    monkeypatch.setattr(suite, "CHECKS", checks)
    monkeypatch.setattr(page, "CHECKS", checks)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "host", "--rehearse", "--results", str(tmp_path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert __main__.main() == 1
    found = outcomes.read(tmp_path)
    ended = {name: outcome.status for name, outcome in found.items()}
    expected = ("passed", "failed", "error", "error", "error", "error", "not checked")
    assert ended == dict(zip(names, expected))
    text = (tmp_path / "gpu.md").read_text()
    assert "- Does not hold: one is two." in text
    assert "RuntimeError: a driver without a road (test_rehearsal.py:" in text
    assert "ended with 7; its log ends: a last word" in text
    assert re.search(r"not done after 8 s, at test_rehearsal.py:\d+; its log ends: .*waiting for a kernel", text)
    assert found["hanging"].result.rows == [{"until then": "a row"}], "what was measured before stays"
    assert found["stuck"].reason.startswith("not done after 3 s; its log ends:")
    assert "**Not checked** because this is no place for it." in text
    assert found["raising"].result.figures == {"until then": 1}, "what was measured before stays"


def test_what_the_time_does_not_reach_is_said_to_be_not_checked(tmp_path):
    [first, *_] = suite.run_part("host", lambda folder: None, tmp_path, MACHINE, minutes=0)
    assert (first.status, first.reason) == ("not checked", "the part's 0 minutes were over")
    assert page.render({first.check: first}).count("**Not checked** because the part's 0 minutes were over.") == 1


@pytest.mark.parametrize("part", ["throughput-settings", "throughput-streams", "throughput-fp8"])
def test_a_part_that_compiles_much_has_time_for_all_of_its_checks(part):
    assert 0 < sum(check.seconds for check in suite.CHECKS if check.part == part) <= 8 * 60


def test_what_passed_before_of_this_commit_on_such_a_device_can_be_skipped(tmp_path, monkeypatch):
    names = ("holding", "not_holding", "elsewhere")
    checks = [Check(name, 1, "host", f"A check: {name}", f"test_rehearsal:{name}", seconds=60.0) for name in names]
    monkeypatch.setattr(suite, "CHECKS", checks)

    def make_bench(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(folder=folder)

    def ran(described: dict[str, Any], **options: Any) -> list[str]:
        return [one.check for one in suite.run_part("host", make_bench, tmp_path, described, minutes=10, **options)]

    assert ran(MACHINE) == [*names]
    assert ran(MACHINE, skip_passed=True) == ["not_holding", "elsewhere"]
    assert ran({**MACHINE, "device": "another GPU"}, skip_passed=True) == [*names]
    assert ran({**MACHINE, "commit": "abd"}, skip_passed=True) == [*names]
    assert ran(MACHINE) == [*names], "what is not skipped is checked anew"


def test_the_page_has_what_ran_before_and_what_did_not_run(tmp_path):
    machine = {**MACHINE, "packages": {"torch": "2"}}
    outcomes.write(tmp_path, Outcome("stop-flag", "passed", "", 1.0, Result({"answered after, ms": 1.5}), machine))
    text = page.render(outcomes.read(tmp_path))
    assert "| answered after, ms | 1.5 |" in text and "rehearsal" not in text
    assert (
        "**Not run:**\n\n- A ragged evaluation, then training: `python -m tests.gpu kernels --only compiled`\n" in text
    )


def test_the_page_of_this_repository_is_made_from_its_results():
    found = outcomes.read(ROOT / "tests/gpu/results")
    assert {*found} <= {check.name for check in suite.CHECKS}
    assert (ROOT / "docs/results/gpu.md").read_text() == page.render(found)


def test_the_page_says_of_which_checks_the_times_count(tmp_path):
    for beside in (True, False):
        described = {**MACHINE, "beside": beside}
        text = page.render({"stop-flag": Outcome("stop-flag", "passed", "", 1.0, Result({"ms": 1.5}), described)})
        assert (page.BESIDE in text) is beside


def test_rows_of_one_kind_are_one_table_and_rows_without_a_problem_are_left_out():
    rows = {
        "throughput-36-eager": [{"batch": 36, "images/s": 500.0}],
        "throughput-256-eager": [{"batch": 256, "images/s": 2000.0}],
        "resume-one-rank": [{"optimizer": "adamw", "problem": ""}, {"optimizer": "sgd", "problem": "it differs"}],
    }
    found = {name: Outcome(name, "passed", "", 1.0, Result(rows=some), MACHINE) for name, some in rows.items()}
    text = page.render(found)
    assert "| 36 | 500 |\n| 256 | 2,000 |\n" in text and text.count("| batch | images/s |") == 1
    assert "| sgd | it differs |" in text and "adamw" not in text


@pytest.mark.parametrize(("crowd", "warm", "counted"), [(0, 5, 10), (4, 5, 12), (15, 15, 30)])
def test_of_what_comes_in_crowds_whole_crowds_are_measured(crowd, warm, counted):
    bench, taken = SimpleNamespace(synchronize=lambda: None, sizes=SimpleNamespace(seconds=0.0)), []
    seconds_per_step(bench, iter(lambda: taken.append(None), "never"), 5, 10, crowd)
    assert len(taken) == warm + counted


def test_what_torch_would_run_eagerly_at_its_limit_of_recompilations_fails(tmp_path):
    bench = Bench(torch.device("cpu"), TINY, tmp_path)
    torch._dynamo.reset()
    with bench.compiling(), torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(lambda number, values: values + number, dynamic=False)
        for number in range(2):
            compiled(number, torch.zeros(2))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(5, torch.zeros(2))


def test_variants_take_turns_each_in_a_process_that_no_other_has_touched(tmp_path):
    def begin(name: str, bench: Bench) -> Any:
        (bench.folder / "begun").touch()
        left = []

        def measure() -> tuple[str, int, int]:
            left.append(name)
            return bench.folder.name, len(left), os.getpid()

        return measure

    bench = Bench(torch.device("cpu"), TINY, tmp_path)
    found = in_turns(bench, {name: partial(begin, name) for name in "ab"}, rounds=2)
    assert {name: [turn[:2] for turn in turns] for name, turns in found.items()} == {
        name: [(name, 1), (name, 2)] for name in "ab"
    }
    assert len({turn[2] for turns in found.values() for turn in turns} | {os.getpid()}) == 3


def test_a_variant_that_cannot_run_here_or_fails_says_why(tmp_path):
    bench = Bench(torch.device("cpu"), TINY, tmp_path)
    with pytest.raises(NotChecked, match="this is no place for it"):
        in_turns(bench, {"elsewhere": lambda own: elsewhere(own, Result())})
    with pytest.raises(RuntimeError, match="^crashing ended with 7; its log ends:\na last word$"):
        in_turns(bench, {"crashing": lambda own: partial(crashing, own, Result())})


def holding(bench: Any, result: Result) -> None:
    result.expect(Path.cwd() == bench.folder, "a check has a folder of its own")


def not_holding(bench: Any, result: Result) -> None:
    result.expect(False, "one is two")


def raising(bench: Any, result: Result) -> None:
    result.figures["until then"] = 1
    raise RuntimeError("a driver without a road")


def crashing(bench: Any, result: Result) -> None:
    os.write(1, b"a last word\n")
    os._exit(7)


def hanging(bench: Any, result: Result) -> None:
    result.rows.append({"until then": "a row"})
    os.write(1, b"waiting for a kernel\n")
    with contextlib.suppress(Exception):  # as torch.compile and the fallback to eager models catch every one
        time.sleep(60)


def stuck(bench: Any, result: Result) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(60)


def elsewhere(bench: Any, result: Result) -> None:
    raise NotChecked("this is no place for it")
