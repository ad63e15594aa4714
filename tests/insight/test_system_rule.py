"""Each side of what the rules on quotas and memory decide by."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from launcher.insight.answers import Answer, NotMeasured
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.measurements import Host, Measurements, Series
from launcher.insight.rules import system
from launcher.insight.rules.table import judge
from tests.insight.planted import BEGAN, plant
from tests.insight.test_data_rule import beside_the_device

STEP = {"data_wait": 0.01, "student_forward": 0.33, "backward": 0.66}
QUOTA = dict(phases=STEP, noise=0.0, cores=8, usable=2, busy=1.6, settings={"num_workers": 1})


def throttled(**changed) -> Finding | None:
    found = judge(Evidence(plant(**{**QUOTA, **changed}))).findings
    return next((one for one in found if one.kind == "cpu_throttled"), None)


@pytest.mark.parametrize(("percent", "accused"), [(9, False), (11, True)])
def test_a_quota_counts_from_a_tenth_of_the_time(percent, accused):
    assert (throttled(throttled=percent) is not None) == accused


@pytest.mark.parametrize(("gpu", "wait", "accused"), [(92, 0.01, False), (88, 0.01, True), (96, 0.2, True)])
def test_a_quota_is_felt_where_the_gpu_or_a_step_waits(gpu, wait, accused):
    assert (throttled(throttled=40, gpu=gpu, phases={**STEP, "data_wait": wait}) is not None) == accused


@pytest.mark.parametrize(("device", "accused"), [(0.95, False), (0.6, True)])
def test_a_wait_that_the_device_fills_loses_nothing_to_a_quota(device, accused):
    run = beside_the_device(0.8, device, gpu=96, throttled=20, cores=8, usable=2, busy=1.6, settings={"num_workers": 1})
    found = [one for one in judge(Evidence(run)).findings if one.kind == "cpu_throttled"]
    assert bool(found) == accused and all(one.share == pytest.approx(0.4, abs=0.01) for one in found)


@pytest.mark.parametrize(
    ("changed", "share"),
    [
        ({"throttled": 30}, 0.3),
        ({"throttled": 30, "phases": {**STEP, "data_wait": 0.99}}, 0.5),
        ({"throttled": 30, "gpu": 40}, 0.6),
        ({"throttled": 30, "gpu": 40, "phases": {**STEP, "data_wait": 2.31}}, 0.7),
    ],
)
def test_the_share_is_what_shows_most_of_the_quota(changed, share):
    assert throttled(**changed).share == pytest.approx(share, abs=0.02)


def test_the_evidence_names_the_quotas_cores_and_how_they_are_used():
    found = throttled(throttled=30, gpu=40)
    reported = ["throttled 30 % of the time; cores of the quota: algo-1 2", "80 % of them in use", "GPUs idle 60 % of the time"]  # fmt: skip
    assert [*found.evidence] == reported and len(throttled(throttled=30).evidence) == 2


def test_a_quota_on_a_host_whose_cores_were_not_watched_is_reported_without_them():
    times = np.arange(60.0)
    gpus = {"gpu0": Series(times, np.full(60, 40.0))}
    host = Host(name="algo-1", gpus=gpus, throttled=Series(times, np.full(60, 30.0)))
    found = judge(Evidence(Measurements(source="hosts", hosts={"algo-1": host}))).findings
    [quota] = [one for one in found if one.kind == "cpu_throttled"]
    assert quota.evidence == (
        "throttled 30 % of the time; cores of the quota: not recorded",
        "GPUs idle 60 % of the time",
    )


@pytest.mark.parametrize(("workers", "advised"), [(1, False), (2, False), (3, True), (None, True)])
def test_fewer_workers_are_advised_where_there_are_more_than_the_quota_has_cores(workers, advised):
    settings = [fix.setting for fix in throttled(throttled=30, settings={"num_workers": workers}).fixes]
    assert ("hyperparameters.num_workers" in settings) == advised


# Memory

POINTS = 100
HOUR = 3600.0


def memory(values, seconds: float = 2 * HOUR) -> Answer:
    """What is said of a host's memory with these values, evenly over that time."""
    series = Series(BEGAN + np.linspace(0, seconds, len(values)), np.asarray(values, float))
    hosts = {"algo-1": Host(name="algo-1", memory=series)}
    return system.host_memory(Evidence(Measurements(source="memory", hosts=hosts)))


@pytest.mark.parametrize(("growth", "grows"), [(8, False), (9, True)])
def test_memory_grows_from_five_points_in_the_later_three_fifths(growth, grows):
    found = memory(np.linspace(40, 40 + growth, POINTS))
    assert isinstance(found, Finding) == grows


def test_what_grows_before_caches_are_full_does_not_count():
    assert memory([*np.linspace(10, 60, 40), *np.full(60, 60.0)]) is None


@pytest.mark.parametrize(("middle", "grows"), [(3.0, False), (4.5, True), (5.5, True), (7.0, False)], ids="{}".format)
def test_memory_that_rises_in_one_part_of_the_time_alone_does_not_grow(middle, grows):
    """Thirds of the later part at 40, 40 + middle and 50 %."""
    found = memory(np.repeat([30.0, 30.0, 40.0, 40 + middle, 50.0], 20))
    assert isinstance(found, Finding) == grows


@pytest.mark.parametrize(
    ("seconds", "left", "last"),
    [(2 * HOUR, "2.0 h", "1.2 h"), (HOUR / 3, "20.2 min", "11.9 min"), (20.0, "20 s", "12 s")],
)
def test_the_title_says_when_memory_is_full(seconds, left, last):
    """From 40 to 70 %, so 30 points more take as long again."""
    found = memory(np.linspace(40, 70, POINTS), seconds)
    assert found.title == f"Memory grows: the memory of algo-1 is full in about {left}"
    assert found.evidence == (f"algo-1: 18 percentage points in the last {last}, 69 % at the end and rising",)


@pytest.mark.parametrize(("end", "urgent"), [(38.5, False), (44.5, True)])
def test_memory_that_is_full_within_ten_times_the_time_watched_is_urgent(end, urgent):
    """Six points in the time watched."""
    assert memory(np.linspace(end - 10, end, POINTS)).urgent == urgent


def loading(load: float, train: float, grows: float = 0.0) -> Measurements:
    """A host whose memory fills from 10 to 60 % before the first step, and grows in the steps."""
    run = plant(phases={"student_forward": 0.08, "backward": 0.16}, steps=round(train / 0.24), steps_per_epoch=10_000, gpu=92,
                facts={"seconds_to_first_step": load})  # fmt: skip
    times = np.arange(BEGAN - load, run.ranks[0].ended[-1], 0.5)
    values = np.interp(times, [BEGAN - load, BEGAN, times[-1]], [10.0, 60.0, 60.0 + grows])
    values += np.random.default_rng(0).normal(0, 0.1, len(times))
    host = dataclasses.replace(run.hosts["algo-1"], memory=Series(times, values))
    return dataclasses.replace(run, hosts={"algo-1": host})


@pytest.mark.parametrize(("load", "train"), [(300, 60), (600, 90), (50, 12), (300, 8)])
def test_what_is_loaded_before_the_first_step_is_no_growth(load, train):
    found = judge(Evidence(loading(load, train))).findings
    assert [one.kind for one in found] == (["slow_start"] if load >= 300 else [])


def test_memory_that_grows_in_the_steps_is_found_after_any_start():
    first, *_ = judge(Evidence(loading(300, 60, grows=20.0))).findings
    assert first.kind == "memory_growth" and first.urgent
    assert first.evidence == ("algo-1: 12 percentage points in the last 36 s, 80 % at the end and rising",)


def test_too_few_samples_in_the_steps_are_reported():
    reported = system.host_memory(Evidence(loading(300, 8)))
    assert isinstance(reported, NotMeasured) and reported.reason == "fewer than 20 samples while steps ran"


def test_fewer_than_twenty_samples_show_no_trend():
    few, enough = (memory(np.linspace(40, 80, samples)) for samples in (19, 20))
    assert isinstance(few, NotMeasured) and few.reason == "fewer than 20 samples" and isinstance(enough, Finding)
