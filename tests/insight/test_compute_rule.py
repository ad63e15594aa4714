"""Each side of what the rules on the device's time decide by: copies to it, a teacher, arithmetic in fp32."""

from __future__ import annotations

import pytest

from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.report import Report
from launcher.insight.rules.table import judge
from tests.insight.planted import plant

STEP = {"data_wait": 0.01, "student_forward": 0.33, "backward": 0.66}
"""A second."""


def report(**planted) -> Report:
    return judge(Evidence(plant(**{"phases": STEP, "noise": 0.0, "gpu": 95, **planted})))


def finding(kind: str, **planted) -> Finding | None:
    return next((one for one in report(**planted).findings if one.kind == kind), None)


def missing(reported: Report, what: str) -> str:
    [reason] = [one.reason for one in reported.not_measured if one.what == what]
    return reason


def within(share: float, phase: str) -> dict[str, float]:
    """The step's phases, scaled to leave a share of a second to another one."""
    return {**{name: seconds * (1 - share) for name, seconds in STEP.items()}, phase: share}


# Copies


@pytest.mark.parametrize(("share", "slow"), [(0.09, False), (0.11, True)])
def test_copies_count_from_a_tenth_of_a_step(share, slow):
    assert (finding("host_to_device_bound", phases=within(share, "host_to_device")) is not None) == slow


@pytest.mark.parametrize(
    ("pipeline", "gpu", "advised"), [("cpu", 95, True), ("dali", 95, False), (None, 95, False), ("cpu", None, False)]
)
def test_jpegs_are_decoded_on_a_gpu_that_does_not_do_so_yet(pipeline, gpu, advised):
    settings = {} if pipeline is None else {"preprocessing": pipeline}
    planted = plant(phases=within(0.3, "host_to_device"), noise=0.0, gpu=gpu, settings=settings)
    if pipeline is None:  # a script that is not the kit's
        del planted.settings["preprocessing"]
    [found] = [one for one in judge(Evidence(planted)).findings if one.kind == "host_to_device_bound"]
    assert any(fix.value == "dali" for fix in found.fixes) == advised


@pytest.mark.parametrize(("copied_beside", "advised"), [(False, True), (True, False), (None, False)])
def test_copies_by_a_stream_are_advised_where_the_job_knows_them_and_has_none(copied_beside, advised):
    settings = {"preprocessing": "cpu"} | ({} if copied_beside is None else {"copy_stream": copied_beside})
    found = finding("host_to_device_bound", phases=within(0.3, "host_to_device"), settings=settings)
    assert ("hyperparameters.copy_stream" in [fix.setting for fix in found.fixes]) == advised


def test_fixes_leave_out_what_they_exclude():
    """Else the job that has them is refused: tune and the printed command apply all of a fix."""
    settings = {"preprocessing": "cpu", "copy_stream": True, "teacher_stream": True, "precision": "fp32"}
    copies = finding("host_to_device_bound", phases=within(0.3, "host_to_device"), settings=settings)
    [dali] = [fix for fix in copies.fixes if fix.value == "dali"]
    assert dali.also == {"hyperparameters.copy_stream": False, "hyperparameters.teacher_stream": False}
    cache = taught(settings=settings).fixes[0]
    assert cache.setting == "hyperparameters.teacher_cache"
    assert cache.also == {"hyperparameters.teacher_stream": False}
    without = {**settings, "copy_stream": False, "teacher_stream": False}
    assert taught(settings=without).fixes[0].also == {}


def test_of_a_teacher_with_a_stream_only_the_wait_is_known():
    planted = {"phases": within(0.1, "teacher_forward"), "settings": {"teacher_stream": True}}
    said = missing(report(**planted), "a teacher that takes much of the step")
    assert said.startswith("teacher_stream runs it during the student's previous step")
    assert taught(0.4, settings={"teacher_stream": True}) is not None, "the wait alone is much"


def test_copies_are_none_without_a_gpu_and_not_measured_without_steps():
    assert dict(report(gpu=None).not_applicable)["copying batches to the device"] == "no GPU"
    what = "copying batches to the device"
    assert missing(report(), what) == "host_to_device was not recorded"
    assert (
        missing(report(phases=None), what)
        == missing(report(phases=None, gpu=None), what)
        == "no step timeline was found"
    )


# A teacher


def taught(share: float = 0.4, **changed) -> Finding | None:
    return finding("teacher_bound", phases=within(share, "teacher_forward"), **changed)


@pytest.mark.parametrize(("share", "slow"), [(0.24, False), (0.26, True)])
def test_a_teacher_counts_from_a_quarter_of_a_step(share, slow):
    assert (taught(share) is not None) == slow


@pytest.mark.parametrize(
    ("epochs", "views", "expected", "said"),
    [
        (100, 10, 1 / (1 - 0.4 * 0.9), "come in 10 reproducible views"),
        (20, 2, 1 / (1 - 0.4 * 0.9), "come in 2 reproducible views"),
        (15, 1, 1 / (1 - 0.4 * (1 - 1 / 15)), "come in 1 reproducible view,"),
        (2, 1, 1 / (1 - 0.4 * 0.5), "come in 1 reproducible view,"),
    ],
)
def test_a_cached_teacher_runs_in_a_tenth_of_the_epochs(epochs, views, expected, said):
    found = taught(settings={"epochs": epochs})
    assert (found.fixes[0].setting, found.fixes[0].value) == ("hyperparameters.teacher_cache", {"views": views})
    assert found.gain.expected.value == pytest.approx(expected) and said in found.fixes[0].why
    assert f"the teacher runs in {views} of {epochs} epochs" in found.gain.formula


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ({"epochs": 1, "precision": "fp32"}, ["teacher_precision", "compile_teacher"]),
        ({"epochs": None, "precision": "fp32"}, ["teacher_precision", "compile_teacher"]),
        ({"teacher_cache": {"views": 2}, "precision": "fp32"}, ["teacher_precision", "compile_teacher"]),
        ({"teacher_cache": {"views": 2}, "precision": None}, ["teacher_precision", "compile_teacher"]),
        ({"teacher_cache": {"views": 2}, "precision": "bf16"}, ["compile_teacher"]),
        ({"teacher_cache": {"views": 2}, "precision": "fp32", "teacher_precision": "bf16"}, ["compile_teacher"]),
        ({"teacher_cache": {"views": 2}, "precision": "bf16", "compile_teacher": True}, [""]),
        ({"precision": "fp32"}, ["teacher_cache", "teacher_precision", "compile_teacher"]),
    ],
    ids=str,
)
def test_a_teacher_is_told_only_what_it_does_not_do_yet(settings, advised):
    found = taught(settings=settings)
    assert [(fix.setting or "").removeprefix("hyperparameters.") for fix in found.fixes] == advised
    expected = {"teacher_cache": 1 / (1 - 0.4 * 0.9), "teacher_precision": 1 / (1 - 0.4 / 2)}.get(advised[0])
    assert (found.gain.expected and found.gain.expected.value) == (expected and pytest.approx(expected))
    cached = bool(settings.get("teacher_cache"))
    assert found.title.endswith("; its cache is being filled") == cached
    assert f"{'with' if cached else 'without'} a cache" in found.evidence[1]


def test_a_run_that_fills_a_label_bank_is_not_said_to_repeat_its_teachers_work():
    cached = {"teacher_cache": {"views": 2}}
    labels = finding("teacher_bound", phases={"data_wait": 0.1, "teacher_forward": 0.9}, settings=cached)
    assert labels.cause == "it runs once for each view of an image, which is the purpose of this run"
    assert "again in every epoch" in taught(settings=cached).cause


def test_a_teacher_on_other_hosts_is_not_blamed_for_what_reading_its_logits_takes():
    assert taught(settings={"teacher_servers": {"top_k": 10}}) is None


def test_a_teacher_that_is_not_there_is_not_blamed_for_what_reading_its_label_bank_takes():
    assert taught(settings={"teacher_cache": {"views": 2, "complete": True}}) is None


def test_on_the_cpu_fewer_bits_make_no_teacher_faster():
    found = taught(gpu=None, settings={"precision": "fp32"})
    assert "teacher_precision" not in str(found.fixes)


def test_the_evidence_has_the_teachers_precision_and_the_students_forward_pass():
    found = taught(settings={"precision": None})
    assert found.evidence == (
        "teacher forward: 40 % of a step of 1 s, student forward 20 %",
        "teacher in fp32, without a cache, 100 epochs",
    )
    assert "(now fp32)" in str(found.fixes[1])
    alone = finding("teacher_bound", phases={"data_wait": 0.01, "teacher_forward": 0.5, "backward": 0.5})
    assert "student" not in alone.evidence[0]


def test_no_teacher_is_told_apart_from_one_that_was_not_measured():
    what = "a teacher that takes much of the step"
    assert dict(report().not_applicable)[what] == "no teacher ran"
    assert missing(report(phases=None), what) == "no step timeline was found"


# Arithmetic


def slow_arithmetic(**changed) -> Finding | None:
    return finding("fp32_compute", **{"settings": {"precision": "fp32"}, **changed})


@pytest.mark.parametrize(
    ("changed", "slow"),
    [
        ({}, True),
        ({"settings": {"precision": "tf32"}}, False),
        ({"phases": within(0.49, "host_to_device")}, True),
        ({"phases": within(0.51, "host_to_device")}, False),
        ({"gpu": 72}, True),
        ({"gpu": 68}, False),
        ({"gpu": None}, False),
        ({"gpu": None, "facts": {"device": "cuda"}}, True),
        ({"phases": None}, True),
        ({"phases": None, "settings": {}}, False),
    ],
    ids=str,
)
def test_fp32_costs_where_a_busy_gpu_computes_half_the_time(changed, slow):
    assert (slow_arithmetic(**changed) is not None) == slow


def test_twice_as_fast_arithmetic_is_expected():
    found = slow_arithmetic(phases={"data_wait": 0.2, "student_forward": 0.3, "backward": 0.5}, gpu=80)
    assert found.share == pytest.approx(0.8) and found.gain.expected.value == pytest.approx(1 / (1 - 0.8 / 2))
    assert found.gain.formula == "a speed-up of 2 for arithmetic: 1 / (1 - 0.80 · 0.50)"
    assert "take 80 % of a step" in found.evidence[0] and found.evidence[1] == "GPUs busy 80 % of the time"
    alone = slow_arithmetic(phases=None, gpu=75)
    assert alone.share == pytest.approx(0.75, abs=0.01), "what the GPU is busy, where no step was timed"
    assert len(slow_arithmetic(gpu=None, facts={"device": "cuda"}).evidence) == 1


def test_a_teacher_in_sixteen_bits_is_no_arithmetic_in_fp32():
    phases = {"teacher_forward": 0.3, "student_forward": 0.3, "backward": 0.4}
    both = slow_arithmetic(phases=phases, settings={"precision": "fp32", "teacher_precision": "fp32"})
    one = slow_arithmetic(phases=phases, settings={"precision": "fp32", "teacher_precision": "bf16"})
    assert both.share == pytest.approx(1.0, abs=0.002) and one.share == pytest.approx(0.7, abs=0.002)
    assert one.gain.expected.value == pytest.approx(1 / (1 - 0.7 / 2), rel=0.005)


@pytest.mark.parametrize(("capability", "advised"), [(6.1, False), (7.0, True)])
def test_a_teacher_is_no_faster_in_fewer_bits_without_tensor_cores(capability, advised):
    found = finding("teacher_bound", phases=within(0.5, "teacher_forward"), settings={"precision": "fp32", "epochs": 1}, facts={"compute_capability": capability})  # fmt: skip
    assert ("hyperparameters.teacher_precision" in [fix.setting for fix in found.fixes]) == advised


@pytest.mark.parametrize(
    ("facts", "values"),
    [
        ({}, ["bf16", "tf32"]),
        ({"compute_capability": 8.6}, ["bf16", "tf32"]),
        ({"compute_capability": 7.0}, ["fp16"]),
        ({"instance_type": "ml.p3.2xlarge"}, ["fp16"]),
        ({"instance_type": "ml.p4d.24xlarge"}, ["bf16", "tf32"]),
        ({"instance_type": "ml.c5.2xlarge", "compute_capability": 7.5}, ["fp16"]),
        ({"instance_type": "local"}, ["bf16", "tf32"]),
    ],
    ids=str,
)
def test_the_sixteen_bits_are_those_that_the_gpu_has(facts, values):
    assert [fix.value for fix in slow_arithmetic(facts=facts).fixes] == values


@pytest.mark.parametrize("facts", [{"compute_capability": 6.1}, {"instance_type": "ml.p2.xlarge"}], ids=str)
def test_a_gpu_without_tensor_cores_gains_nothing_from_fewer_bits(facts):
    reported = report(settings={"precision": "fp32"}, gpu=90, facts=facts)
    assert dict(reported.not_applicable)["arithmetic in fp32"] == "the GPU has no tensor cores"
    assert not [one for one in reported.findings if one.kind == "fp32_compute"]


def test_arithmetic_without_its_precision_or_its_time_is_not_measured():
    what = "arithmetic in fp32"
    assert missing(report(settings={"precision": None}), what) == "the precision of this run is not known"
    reported = report(phases=None, gpu=None, facts={"device": "cuda"}, settings={"precision": "fp32"})
    assert missing(reported, what) == "no step timeline was found"
    assert dict(report(gpu=None).not_applicable)[what] == "no GPU"


def test_the_exchange_is_no_arithmetic():
    """Within backward, and of gradients that autocast leaves in fp32."""
    phases = {"data_wait": 0.02, "student_forward": 0.26, "backward": 0.72, "grad_sync": 0.4}
    found = slow_arithmetic(phases=phases, gpu=97, ranks=2)
    assert found.share == pytest.approx(0.58, abs=0.01)
    assert slow_arithmetic(phases={**phases, "grad_sync": 0.5}, gpu=97, ranks=2) is None
