"""Runs that an H100 with 16 cores really made (2026-11-26, commit 30981ff; fp32: 2026-11-27, 6525e0e): their verdicts, and what a fix brought.

Each archive has what the run left: its timeline, its system metrics and, of the kit's own scripts, its result. The runs were
`launcher run` of a ResNet18 on JPEGs of 500 x 375 pixels (one: a single data worker; small: 8 images a step; compiled: the same with compile=true),
`launcher run quickstart_teacher hyperparameters.epochs=10`, and `launcher watch -- python plain.py`, a script that decodes its images itself;
fp32: a job as KT's began, a ViT-L/16 teacher and a ViT-S/16 student at 36 images a step in fp32, with 16 workers on 12 cores. Other
programs used the machine meanwhile, but not in `small`, `compiled`, `fp32` and the quickstart's.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import launcher
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis

ARCHIVES = Path(__file__).parent / "h100"


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    """Asks for a run's diagnosis by its name."""
    folder = tmp_path_factory.mktemp("h100")
    for archive in ARCHIVES.glob("*.tar.xz"):
        with tarfile.open(archive) as file:
            file.extractall(folder)

    def ask(name: str) -> Diagnosis:
        return launcher.diagnose(folder / name)

    return ask


@pytest.mark.parametrize(
    ("run", "kind", "fix"),
    [
        ("one", "too_few_workers", "hyperparameters.num_workers=11 (now 1)"),
        ("plain", "too_few_workers", "DataLoader(num_workers=0) at plain.py:11: set num_workers=16"),
        ("small", "small_batch", "hyperparameters.compile=true (now false)"),
        ("compiled", "small_batch", "hyperparameters.global_batch_size=32 (now 8)"),
        ("fp32", "fp32_compute", "hyperparameters.precision=bf16 (now fp32)"),
        ("quickstart-teacher", "too_few_workers", "hyperparameters.num_workers=2 (now 0)"),
    ],
)
def test_the_first_finding_is_what_was_wrong(diagnosed, run, kind, fix):
    first, *_ = diagnosed(run).findings
    assert first.kind == kind and any(str(one).startswith(fix) for one in first.fixes), first


def test_threads_that_spin_are_told_apart_from_work(diagnosed):
    """15 cores of 16 were full while one thread decoded: before, the verdict was that its images need more cores than there are. With the
    thread's own and the 2.9 of other programs they add up to the cores in use."""
    [first, *_] = diagnosed("plain").findings
    assert any(one.startswith("other threads of the training process hold 11.7 cores") for one in first.evidence)


def test_what_is_compiled_has_no_compile_among_its_fixes(diagnosed):
    assert not any("compile" in str(fix) for finding in diagnosed("compiled").findings for fix in finding.fixes)


def test_the_fix_that_was_named_made_the_steps_nearly_twice_as_fast(diagnosed):
    before, after = diagnosed("small"), diagnosed("compiled")
    assert before.evidence.step_seconds / after.evidence.step_seconds == pytest.approx(1.94, abs=0.01)
    changed = {name: (was, now) for name, was, now in Comparison(before, after).changed()}
    assert changed["compile"] == (False, True) and changed["cuda_graphs"] == (False, True)


def test_what_bf16_was_expected_to_bring_is_what_it_brought(diagnosed):
    """The same models in bf16 take 66.9 ms a step: tests/gpu/results/throughput-36-eager.json."""
    run = diagnosed("fp32")
    [first, *_] = run.findings
    low, high = first.gain.expected.low, first.gain.expected.high
    assert low < 1000 * run.evidence.step_seconds / 66.9 < high


def test_the_arithmetic_is_measured_against_the_gpus_peak(diagnosed):
    assert diagnosed("small").evidence.facts["arithmetic"]["peak_tflops"] == {"bf16": 989}
