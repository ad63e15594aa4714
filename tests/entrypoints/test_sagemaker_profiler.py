"""SageMaker Profiler records every process of a job that asks for it: the calls, their order, and the names between them."""

from __future__ import annotations

import json
import sys
import types
from contextlib import contextmanager

import pytest
import torch
from training.measure import annotate
from training.measure.sagemaker_profiler import STEPS, SageMakerProfiler
from training.measure.timeline import Timeline
from training.settings.scripts import TrainingSettings

from tests.entrypoints.test_loop import run

CPU = torch.device("cpu")


@pytest.fixture(params=["smprof", "smppy"])
def calls(request, monkeypatch) -> list[str]:
    """What a stand-in of the image's module is asked, in order."""
    found: list[str] = []

    class Profiler:
        @classmethod
        def instance(cls):
            return cls()

        def configure(self, config):
            found.append(f"configure {config.profiler}")

        def start_profiling(self):
            found.append("start")

        def stop_profiling(self):
            found.append("stop")

    @contextmanager
    def named(name):
        found.append(f"<{name}>")
        yield
        found.append(f"</{name}>")

    module = types.ModuleType(request.param)
    module.SMProfiler, module.Config, module.annotate = Profiler, types.SimpleNamespace, named
    for name in ("smprof", "smppy"):
        monkeypatch.setitem(sys.modules, name, module if name == request.param else None)
    annotate.sagemaker_profiler.cache_clear()
    yield found
    annotate.sagemaker_profiler.cache_clear()


def asked(tmp_path, parameters: dict | None) -> dict[str, str]:
    """The environment of a job whose profiler configuration has these parameters."""
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    found = {"S3OutputPath": "s3://bucket", **({"ProfilingParameters": parameters} if parameters else {})}
    (config / "profilerconfig.json").write_text(json.dumps(found))
    return {"SAGEMAKER_BASE_DIR": str(tmp_path)}


def train(profiler: SageMakerProfiler, steps: int) -> None:
    timeline = Timeline(CPU)
    for _ in range(steps):
        profiler.step()
        with timeline.phase("backward"):
            pass
    profiler.close()


KTS = {"CPUProfilingDuration": "3600", "SMPFileRotationSecs": "600"}


def test_a_job_that_asks_for_a_profiler_is_recorded_without_profile_steps(calls, tmp_path):
    said: list[str] = []
    train(SageMakerProfiler(TrainingSettings(profile_after=2), CPU, said.append, asked(tmp_path, KTS)), 4)
    step = ["<backward>", "</backward>"]
    assert calls == [*step, *step, "configure {'EnableCuda': '0'}", "start", *step, *step, "stop"]
    assert said == [f"SageMaker Profiler records steps 3 to {2 + STEPS} of each process"]


def test_it_records_no_more_steps_than_aws_advises(calls, tmp_path):
    train(SageMakerProfiler(TrainingSettings(profile_after=0), CPU, print, asked(tmp_path, KTS)), STEPS + 3)
    assert calls.count("start") == calls.count("stop") == 1
    assert calls[: calls.index("stop")].count("<backward>") == STEPS


def test_profile_steps_sets_the_window_and_alone_asks_for_torchs_profiler_only(calls, tmp_path):
    settings = TrainingSettings(profile_after=1, profile_steps=2)
    train(SageMakerProfiler(settings, CPU, print, asked(tmp_path, None)), 5)
    assert not {"start", "stop"} & {*calls}
    train(SageMakerProfiler(settings, CPU, print, asked(tmp_path / "asked", KTS)), 5)
    assert calls.index("stop") - calls.index("start") == 5


def test_a_job_that_does_not_ask_is_not_recorded(calls, tmp_path):
    train(SageMakerProfiler(TrainingSettings(profile_after=0), CPU, print, asked(tmp_path, None)), 3)
    assert not {"start", "stop"} & {*calls}


def test_an_image_without_the_module_is_named_once(monkeypatch, tmp_path):
    for name in ("smprof", "smppy"):
        monkeypatch.setitem(sys.modules, name, None)
    annotate.sagemaker_profiler.cache_clear()
    said: list[str] = []
    train(SageMakerProfiler(TrainingSettings(profile_after=0), CPU, said.append, asked(tmp_path, KTS)), 3)
    annotate.sagemaker_profiler.cache_clear()
    assert len(said) == 1 and "lacks the module smprof" in said[0]


def test_a_training_run_is_recorded_from_its_first_profiled_step_to_its_end(calls, tmp_path, monkeypatch):
    for name, value in asked(tmp_path / "ml", KTS).items():
        monkeypatch.setenv(name, value)
    run(tmp_path, profile_after=2)
    start, stop = calls.index("start"), calls.index("stop")
    assert calls.count("start") == calls.count("stop") == 1
    assert calls[:start].count("<backward>") == 2 and calls[start:stop].count("<backward>") == 13
    assert {"<data_wait>", "<student_forward>", "<optimizer>"} <= {*calls[start:stop]}
