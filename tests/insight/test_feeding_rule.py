"""Each side of what the rules on a device that waits for the training process decide by."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.insight.answers import EXPLAINED, Answer, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.rules import feeding
from launcher.insight.rules.table import judge
from launcher.insight.script import Address, SampledLine, Script
from tests.insight.planted import plant
from tests.insight.test_neighbours import with_threads

STEP = {"data_wait": 0.01, "student_forward": 0.33, "backward": 0.66}
"""A second."""

IDLE = dict(phases=STEP, noise=0.0, gpu=50, gpu_memory=75, busy=2.0)
"""A GPU that idles half the time beside large steps and free cores."""


def asked(**changed) -> Answer:
    return feeding.starved(Evidence(plant(**{**IDLE, **changed})))


def kind(**changed) -> str | None:
    answer = asked(**changed)
    return answer.kind if isinstance(answer, Finding) else None


def step(seconds: float) -> dict[str, float]:
    return {name: share * seconds for name, share in STEP.items()}


def gapped(share: float, **changed) -> dict[str, object]:
    """A step of a second with that share in no phase."""
    return {"phases": step(1 - share), "gap": share, **changed}


@pytest.mark.parametrize(("gap", "found"), [(0.14, None), (0.16, "main_thread_bound")])
def test_on_the_cpu_time_in_no_phase_is_the_loops_own_code(gap, found):
    assert kind(**gapped(gap, gpu=None)) == found


@pytest.mark.parametrize(
    ("gap", "gpu", "found"),
    [
        (0.0, 72, None),
        (0.0, 67, "gpu_starved"),
        (0.14, 74, None),
        (0.16, 95, None),
        (0.16, 88, "gpu_starved"),
        (0.16, 74, "gpu_starved"),
    ],
)
def test_a_gpu_is_starved_from_three_tenths_idle_or_less_where_time_lies_in_no_phase(gap, gpu, found):
    assert kind(**gapped(gap, gpu=gpu)) == found


@pytest.mark.parametrize(
    ("planted", "share"),
    [
        ({}, 0.49),  # without the wait for data
        ({"phases": {"data_wait": 0.01, "host_to_device": 0.09, "student_forward": 0.3, "backward": 0.6}}, 0.4),
        ({"phases": {**STEP, "grad_sync": 0.09}, "ranks": 2}, 0.4),
        ({"phases": {"data_wait": 0.01, "buffer_sync": 0.09, "student_forward": 0.3, "backward": 0.6}}, 0.4),
        (gapped(0.6), 0.5),  # no more than the GPU idles
        ({"phases": None}, 0.5),
    ],
    ids=str,
)
def test_the_share_is_the_idle_time_that_no_wait_explains(planted, share):
    found = asked(**planted)
    assert found.share == pytest.approx(share, abs=0.01) == found.gain.share


def test_half_the_time_in_checkpoints_leaves_half_of_what_nothing_explains():
    found = asked(checkpoint=(10, 10.0))
    assert found.kind == "gpu_starved" and found.share == pytest.approx(0.245, abs=0.01) == found.gain.share


def test_what_is_missing_is_named():
    phases = {"student_forward": 1.0, "backward": 1.0}
    reported = asked(phases=phases, gpu=None, not_measured={"data_wait": "no loader was seen"})
    assert isinstance(reported, NotMeasured) and reported.reason == "no loader was seen"
    reported = asked(phases=None, gpu=None, facts={"device": "cuda"}, not_measured={"system": "monitor off"})
    assert isinstance(reported, NotMeasured) and reported.reason == "monitor off"


@pytest.mark.parametrize(
    ("planted", "explained"),
    [
        ({"busy": 6.6}, False),
        ({"busy": 7.0}, True),
        ({"busy": 1.0, "io_wait": 0.4}, False),
        ({"busy": 1.0, "io_wait": 0.6}, True),
        ({"gpu": None, "gpus": [60.0, 40.0]}, False),
        ({"gpu": None, "gpus": [70.0, 30.0]}, True),
    ],
    ids=str,
)
def test_system_metrics_alone_may_show_full_cores_slow_disks_or_uneven_gpus_instead(planted, explained):
    assert (asked(phases=None, **planted) is EXPLAINED) == explained


def test_with_timed_steps_a_wait_that_is_none_leaves_the_idle_gpu_unexplained():
    assert kind(busy=7.0) == kind(busy=1.0, io_wait=0.6) == "gpu_starved"
    assert kind(gpus=[70.0, 30.0], ranks=2) == "gpu_starved"


def test_a_process_that_does_not_get_its_core_is_another_finding():
    for busy, explained in ((7.05, False), (7.35, True)):
        assert (asked(busy=busy) is EXPLAINED) == explained
    for percent, explained in ((9, False), (11, True)):
        assert (asked(throttled=percent) is EXPLAINED) == explained
    suspect = dict(noise=0.3, busy=4.0, saturated=1, settings={"num_workers": 8})
    assert asked(**suspect) is EXPLAINED and kind(**{**suspect, "settings": {"num_workers": 4}}) is not None
    idle = Evidence(plant(**IDLE)).gpu_idle - Evidence(plant(**IDLE)).share("data_wait")
    for delay, explained in ((0.09, False), (idle - 0.31, False), (idle - 0.29, True)):
        for busy in (2.0, 7.6):
            found = feeding.starved(Evidence(with_threads(plant(**{**IDLE, "busy": busy}), delay=delay)))
            assert (found is EXPLAINED) == explained
            kept = delay if delay >= 0.1 else 0.0
            assert explained or found.share == pytest.approx(idle - kept, abs=0.01), "the rest is the process's own"


def test_a_process_that_works_whenever_it_has_its_core_is_the_limit_beside_a_neighbour():
    """Of a step of 1 s it computes in 0.55 s and waits for a core in 0.35 s."""
    gap = dict(phases={"data_wait": 0.01, "student_forward": 0.19, "backward": 0.2}, gap=0.6, gpu=15)
    for own, kind in ((0.56, "main_thread_bound"), (0.54, "gpu_starved")):
        run = with_threads(plant(**gap), delay=0.35, cpu=own, workers=0.01)
        assert feeding.starved(Evidence(run)).kind == kind


def test_steps_are_small_by_the_time_in_which_the_process_has_its_core():
    for seconds, kind in ((0.09, "small_batch"), (0.11, "gpu_starved")):
        phases = {"data_wait": 0.01 * seconds, "student_forward": 0.33 * seconds, "backward": 0.66 * seconds}
        run = with_threads(plant(phases=phases, gpu=10, gpu_memory=8), delay=0.4)
        assert feeding.starved(Evidence(run)).kind == kind


# Which of the three


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"settings": {"log_every": 1}}, "synchronising_calls"),
        ({"settings": {"log_every": 2}}, "gpu_starved"),
        ({"settings": {"log_every": 1, "late_metrics": True}}, "gpu_starved"),
        ({"phases": {**step(0.91), "synchronise": 0.09}}, "gpu_starved"),
        ({"phases": {**step(0.89), "synchronise": 0.11}}, "synchronising_calls"),
        ({"phases": step(0.05), "gpu_memory": 57}, "small_batch"),
        ({"phases": step(0.05), "gpu_memory": 64}, "gpu_starved"),
        ({"phases": step(0.07), "gpu_memory": 57}, "gpu_starved"),
        ({"phases": step(0.11), "gpu_memory": 57, "settings": {"batch_size_per_device": 128}}, "small_batch"),
        ({"phases": None, "gpu_memory": 57}, "small_batch"),
        ({"phases": None, "gpu_memory": 64}, "gpu_starved"),
        ({"phases": None, "gpu_memory": 57, "saturated": 1, "settings": {"num_workers": 4}}, "main_thread_bound"),
        ({"phases": None, "gpu_memory": 57, "saturated": 1}, "gpu_starved"),
        ({"cpu_seconds": 0.9, "worker_cpu_seconds": 0.01}, "main_thread_bound"),
        ({"cpu_seconds": 0.8, "worker_cpu_seconds": 0.01}, "gpu_starved"),
        ({"cpu_seconds": 0.8, "worker_cpu_seconds": 0.01, "saturated": 1}, "gpu_starved"),
        ({"phases": step(0.5), "cpu_seconds": 0.45, "worker_cpu_seconds": 0.01}, "main_thread_bound"),
        ({"phases": step(0.5), "cpu_seconds": 0.4, "worker_cpu_seconds": 0.01}, "gpu_starved"),
        ({"saturated": 1}, "main_thread_bound"),
        ({"saturated": 1, "busy": 5.4}, "main_thread_bound"),
        ({"saturated": 1, "busy": 5.8}, "gpu_starved"),
    ],
    ids=str,
)
def test_what_the_training_process_does_meanwhile_tells_the_kinds_apart(planted, found):
    """64 images at a time are half a step of 128."""
    assert kind(**planted) == found


def test_steps_whose_gpus_memory_was_not_watched_may_be_small():
    run = plant(**{**IDLE, "phases": step(0.05)})
    blind = {name: dataclasses.replace(host, gpu_memory={}) for name, host in run.hosts.items()}
    assert feeding.starved(Evidence(dataclasses.replace(run, hosts=blind))).kind == "small_batch"
    alone = plant(**{**IDLE, "phases": None})
    blind = {name: dataclasses.replace(host, gpu_memory={}) for name, host in alone.hosts.items()}
    assert feeding.starved(Evidence(dataclasses.replace(alone, hosts=blind))).kind == "gpu_starved"


# What is said


def test_the_evidence_has_all_that_was_measured():
    found = asked(cpu_seconds=0.9, worker_cpu_seconds=0.3, settings={"log_every": 1})
    assert found.evidence == (
        "GPUs idle 50 % of the time",
        "0 % of a step of 1 s is outside all phases",
        "waiting for data only 1 %",
        "GPU memory at most 76 % in use (95th percentile)",
        "the training process uses 0.60 cores",
        "a core at 95 % or more in 0 % of the samples, 25 % of all in use",
        "log_every is 1",
    )
    assert [fix.value for fix in found.fixes][0] == 20
    synchronised = asked(phases={**step(0.8), "synchronise": 0.2}, settings={"log_every": 10})
    assert "waiting for the device to read a number: 20 % of a step" in synchronised.evidence
    assert "log_every is 10" in synchronised.evidence and "log_every" not in str(synchronised.fixes)
    assert len(asked(phases=STEP, system=False, gpu=None, gap=0.5).evidence) == 2
    assert "uses 1.20 cores" in str(asked(phases=step(0.5), cpu_seconds=0.7, worker_cpu_seconds=0.1).evidence)


def test_the_lines_are_shown_where_the_training_thread_often_is():
    lines = tuple(
        SampledLine(at=Address("train.py", 60 + at, "work()"), phase=None, package=None, in_model=False, share=share)
        for at, share in enumerate((0.3, 0.03, 0.01))
    )
    run = dataclasses.replace(plant(**IDLE), script=Script(lines=lines))
    reported = [line for line in feeding.starved(Evidence(run)).evidence if "the training thread is at" in line]
    assert reported == [
        "the training thread is at train.py:60 in 30 % of the samples: work()",
        "the training thread is at train.py:61 in 3 % of the samples: work()",
    ]


def test_what_is_starved_without_a_reason_is_told_what_would_show_it():
    timed, alone = asked(), asked(phases=None)
    assert timed.title == "The GPUs idle, but not for lack of data" and alone.title == "The GPUs idle"
    assert timed.cause.endswith("no small steps, fully used core or synchronising calls were seen")
    assert alone.cause.endswith("no step timeline was found")
    assert "hyperparameters.profile_steps=5" in str(timed.fixes[1]) and "measure its steps" in str(alone.fixes[0])


@pytest.mark.parametrize(
    ("planted", "suspects"),
    [
        ({"phases": None, "saturated": 1}, True),
        ({"phases": None, "saturated": 1, "busy": 5.8}, True),
        ({"phases": None, "saturated": 0}, False),
        ({"phases": None, "saturated": 1, "settings": {"num_workers": 4}}, False),
        ({"saturated": 1}, False),
    ],
    ids=str,
)
def test_workers_are_suspects_where_a_core_is_full_and_their_number_is_not_known(planted, suspects):
    found = asked(**planted)
    assert (found.kind == "gpu_starved" and bool(found.experiment)) == suspects == ("num_workers=1" in str(found.fixes))


def test_a_batch_in_parts_gets_fewer_of_them_before_it_gets_larger():
    small = dict(phases=step(0.05), gpu_memory=22)
    whole = asked(**small, settings={"global_batch_size": 16})
    assert str(whole.fixes[0]).startswith("hyperparameters.global_batch_size=64 (now 16)")
    assert whole.evidence[-1] == "16 images at a time"
    parts = asked(**small, settings={"global_batch_size": 16, "batch_size_per_device": 8})
    assert str(parts.fixes[0]).startswith("hyperparameters.batch_size_per_device=auto (now 8): fewer than 2 parts")
    unknown = asked(**small, settings={"global_batch_size": None})
    assert "images at a time" not in str(unknown.evidence)
    assert str(unknown.fixes[0]).startswith("a global batch of 4 times the images")


# Fixed cost


def fixed(share: float = 0.3, **changed) -> Answer:
    phases = {**step(1 - share), "optimizer": share}
    return feeding.fixed_cost(Evidence(plant(**{**IDLE, "gpu": None, "phases": phases, **changed})))


@pytest.mark.parametrize(
    ("share", "batch", "small"),
    [
        (0.09, 8, False),
        (0.11, 8, True),
        (0.11, 9, False),
        (0.19, 9, False),
        (0.21, 9, True),
        (0.3, 64, True),
        (0.3, 65, False),
    ],
)
def test_a_batch_is_small_where_the_optimizer_takes_a_fifth_for_few_images_or_a_tenth_for_very_few(share, batch, small):
    assert isinstance(fixed(share, settings={"global_batch_size": batch}), Finding) == small


def test_four_times_the_images_may_take_as_long():
    found = fixed(settings={"global_batch_size": 4})
    assert found.gain.share == pytest.approx(0.75) and found.share == pytest.approx(0.3)
    paused = fixed(settings={"global_batch_size": 4}, checkpoint=(10, 10.0))
    assert paused.gain.share == pytest.approx(0.375) and paused.share == pytest.approx(0.15), "half are checkpoints"
    assert "4 images per process and step" in found.evidence
    assert str(found.fixes[0]).startswith("hyperparameters.global_batch_size=16 (now 4)")


def test_a_batch_whose_size_is_not_known_is_not_judged():
    reported = fixed(settings={"global_batch_size": None})
    assert isinstance(reported, NotMeasured) and reported.reason == "the batch size is not known"
    assert fixed(0.1, settings={"global_batch_size": None}) is None
    missing = feeding.fixed_cost(Evidence(plant(**IDLE)))
    assert isinstance(missing, NotMeasured) and missing.reason == "optimizer was not recorded"


def test_gpus_that_no_rank_uses_are_not_the_runs_own():
    """One process on a machine of eight: its own is busy, or idle beside neighbours' that are not; and a run on the CPU."""
    assert kind(ranks=1, gpus=[95.0] + [0.0] * 7) is None
    assert Evidence(plant(**{**IDLE, "gpus": [95.0] + [0.0] * 7})).gpu_idle == pytest.approx(0.05, abs=0.02)
    assert kind(ranks=2, gpus=[95.0, 0.0, 93.0, 0.0]) is None
    assert kind(ranks=1, gpus=[40.0, 0.0]) == "gpu_starved"
    on_the_cpu = plant(**{**IDLE, "gpus": [0.0], "facts": {"device": "cpu"}})
    assert not Evidence(on_the_cpu).on_gpu and feeding.starved(Evidence(on_the_cpu)) is None


UUIDS = {"gpu0": "GPU-AA-0", "gpu1": "GPU-bb-1"}


def on_devices(*devices: str | None, gpus: list[float], uuids=UUIDS) -> Evidence:
    """A run whose ranks train on these devices of a host with GPUs that are so busy."""
    run = plant(
        phases={"data_wait": 0.5, "student_forward": 0.2, "backward": 0.3}, ranks=len(devices), gpus=gpus, noise=0.0
    )
    ranks = tuple(dataclasses.replace(steps, device_uuid=one) for steps, one in zip(run.ranks, devices))
    hosts = {name: dataclasses.replace(host, gpu_uuids=uuids) for name, host in run.hosts.items()}
    return Evidence(dataclasses.replace(run, ranks=ranks, hosts=hosts))


def test_another_users_busy_gpu_is_not_taken_for_the_runs_own():
    shared = on_devices("aa-0", gpus=[20, 97])
    assert [*shared.gpu_means] == ["algo-1 gpu0"] and shared.gpu_idle == pytest.approx(0.8, abs=0.02)
    assert judge(shared).findings[0].kind == "too_few_workers"
    assert [*on_devices("bb-1", "aa-0", gpus=[20, 97]).gpu_means] == ["algo-1 gpu0", "algo-1 gpu1"]
    assert [*on_devices("bb-1", "bb-1", gpus=[97, 20]).gpu_means] == ["algo-1 gpu1"], "two processes on one GPU"


@pytest.mark.parametrize(
    ("devices", "uuids"),
    [((None,), UUIDS), (("aa-0",), {}), (("aa-0",), {"gpu1": "GPU-bb-1"}), (("another",), UUIDS)],
)
def test_where_devices_were_not_recorded_the_busiest_gpus_are_taken_for_the_runs_own(devices, uuids):
    assert [*on_devices(*devices, gpus=[20, 97], uuids=uuids).gpu_means] == ["algo-1 gpu1"]
    assert len(on_devices("aa-0", None, gpus=[20, 97]).gpu_means) == 2


@pytest.mark.parametrize(("used", "batch"), [(24, 64), (26, 48), (40, 32), (57, None)])
def test_a_gpu_gets_no_more_images_at_once_than_its_memory_holds(used, batch):
    few = asked(phases=step(0.05), gpu_memory=used, settings={"global_batch_size": 16})
    larger = [fix.value for fix in few.fixes if fix.setting == "hyperparameters.global_batch_size"]
    assert larger == ([] if batch is None else [batch]) and (few.gain.expected is None) == (batch is None)


def test_the_kernels_of_nccl_keep_a_gpu_busy():
    """So what it idles is more than the exchange."""
    planted = dict(phases={**STEP, "grad_sync": 0.12}, ranks=2, gpu=62)
    assert kind(**planted) is None and kind(**planted, facts={"backend": "nccl"}) == "gpu_starved"


@pytest.mark.parametrize(("each", "memory", "more"), [(None, 20, {}), (16, 20, {"hyperparameters.batch_size_per_device": 64}), (16, 40, {"hyperparameters.batch_size_per_device": "auto"})], ids=str)  # fmt: skip
def test_a_larger_batch_is_no_more_parts_of_the_same_size(each, memory, more):
    settings = {"global_batch_size": 64, **({} if each is None else {"batch_size_per_device": each})}
    fix = feeding.larger_batch(Evidence(plant(**{**IDLE, "gpu_memory": memory}, settings=settings)), 4, "")
    assert fix.value == 256 and dict(fix.also) == more


def test_a_gpu_that_is_full_makes_a_larger_batch_of_parts_which_saves_the_optimizer_alone():
    def gain(memory):
        planted = {
            "phases": {"student_forward": 0.3, "backward": 0.5, "optimizer": 0.2},
            "gpu": 95,
            "noise": 0.0,
            "gpu_memory": memory,
        }
        return feeding.fixed_cost(Evidence(plant(**planted, settings={"batch_size_per_device": 32}))).gain.expected

    assert gain(80).value == pytest.approx(1 / (1 - 0.2 * 0.75), rel=0.01)
    assert gain(20).value > 1.5 * gain(80).value
