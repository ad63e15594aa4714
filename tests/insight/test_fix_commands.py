"""The commands that a diagnosis prints for its fixes: what a shell makes of them, the launcher takes, and a plan holds without errors."""

from __future__ import annotations

import html
import io
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import launcher
from launcher.commands import main
from launcher.commands.watch import _report
from launcher.config import yaml_file
from launcher.insight import outside
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.findings import Fix
from launcher.insight.measurements import Measurements, read
from launcher.insight.replay import Replay, replay_of
from launcher.prepare import prepare
from launcher.record import records
from launcher.record.records import RunFolder
from launcher.runner import start_record
from launcher.runner.run import Run
from launcher.runner.watch import Ended
from tests.conftest import WEIRD_NAMES
from tests.insight.observed import loader, observed
from tests.insight.planted import plant, write
from tests.insight.test_rules import CPU, GPU, HALVES, PLANTED

SAID = "launcher() { printf '%s\\0' launcher \"$@\"; }; "
"""In a shell: the words that `launcher` gets."""

VARIANTS = (
    {},
    {"preprocessing": "cpu_reference", "augmentation_load": 12, "checkpoint_every": 5},
    {"compose_augmentation": True, "augmentation_load": 12, "image_size": 64, "min_crop_area": 0.25, "compile": True},
)
"""Settings on which fixes depend."""

DISTILS = {"student": "resnet18", "teacher": "resnet50", "teacher_pretrained": True}

WITH_GPUS = {
    "role": "arn:aws:iam::123456789012:role/SageMakerTraining",
    "region": "us-west-2",
    "output": "s3://amzn-s3-demo-bucket/runs",
    "image": {"framework_version": "2.8.0", "python": "py312"},
    "inputs": {part: {"s3": f"s3://amzn-s3-demo-bucket/{part}/"} for part in ("train", "validation")},
}


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder with training and held-out images."""
    return drawn(tmp_path / "data" / "food")


def drawn(folder: Path) -> Path:
    encoded = io.BytesIO()
    Image.new("RGB", (24, 24)).save(encoded, "PNG")
    for part, label in itertools.product(("train", "validation"), ("a", "b")):
        (folder / part / label).mkdir(parents=True)
        for number in range(128):
            (folder / part / label / f"{number}.png").write_bytes(encoded.getvalue())
    return folder


def job_of(measured: Measurements, images: Path, **settings) -> tuple[launcher.Job, str]:
    """A job of which the measurements may be, and its backend: one GPU a host on SageMaker, or processes of this machine."""
    processes = measured.facts.get("world_size", 1)
    values = {
        "name": "planted",
        "script": "train_kd.py",
        "distribution": "torchrun" if processes > 1 else "none",
        "hyperparameters": {**DISTILS, **settings},
    }
    serving = [group["instance_count"] for group in measured.facts.get("serving_groups", ())]
    if serving:
        values["hyperparameters"]["worker_type"] = "remote"
    if measured.facts.get("device") == "cuda" or any(host.gpus for host in measured.hosts.values()):
        compute = {**of_hosts("ml.g5.2xlarge", processes, serving), "max_hours": 1}
        return launcher.from_values({**values, **WITH_GPUS, "compute": compute}), "aws"
    inputs = {part: {"folder": str(images / part)} for part in ("train", "validation")}
    compute = {**(of_hosts("ml.c5.4xlarge", 1, serving) if serving else {}), "processes_per_host": processes}
    return launcher.from_values({**values, "inputs": inputs, "compute": compute}), "process"


def of_hosts(instance_type: str, count: int, serving: Sequence[int]) -> dict[str, Any]:
    """The compute of a job: hosts that train, and groups of hosts that serve."""
    if not serving:
        return {"instance_type": instance_type, "instance_count": count}
    groups = [{"name": "training", "instance_type": instance_type, "instance_count": count}]
    groups += [
        {"name": f"serving-{number}", "instance_type": "ml.c5.4xlarge", "instance_count": hosts}
        for number, hosts in enumerate(serving, start=1)
    ]
    return {"instance_groups": groups, "training_groups": ["training"]}


def recorded(job: launcher.Job, on: str = "process") -> RunFolder:
    """The record of a job, as its run writes it before it starts."""
    plan = launcher.plan(job, on=on)
    assert plan.errors == ()
    folder = RunFolder(records.store() / plan.name)
    folder.path.mkdir(parents=True)
    start_record.write(plan, folder)
    return folder


def typed(command: str) -> Iterator[list[str]]:
    """The words of each call of the launcher, as a shell reads a command."""
    found = subprocess.run(["bash", "-c", SAID + command], capture_output=True, text=True, check=True).stdout
    for words in split(found.split("\0")[:-1]):
        yield words[1:]


def split(words: Sequence[str]) -> Iterator[Sequence[str]]:
    """The words of each call of the launcher, without what joins them."""
    starts = [place for place, word in enumerate(words) if word == "launcher"]
    for start, end in zip(starts, [*starts[1:], len(words)]):
        yield [word for word in words[start:end] if word != "&&"]


def carried_out(command: str) -> launcher.Plan:
    """The plan to which a command leads. Images are prepared; nothing is started."""
    *before, last = map(main.read, typed(command))
    for options in before:
        assert options.command == "prepare" and options.carry_out(options) == 0
    assert last.command == "replay"
    return launcher.replay(last.run, last.overrides, on=last.on)


def value_at(values: Mapping[str, Any], key: str) -> object:
    at: Any = values
    for name in key.split("."):
        at = at[int(name) if isinstance(at, list) else name]
    return at


def check(fix: Fix) -> None:
    """Its command leads to a plan without errors that has what the fix says."""
    plan = carried_out(fix.command)
    assert plan.errors == (), (fix.command, plan.errors)
    assert plan.replay_of == fix.run
    for key, value in fix.keys.items():
        assert value_at(plan.job.model_dump(), key) == value, fix.command


def planted_fixes(replayed: Replay, variant: Mapping[str, Any]) -> Iterator[tuple[Fix, Measurements]]:
    """Each fix, with what it is for."""
    for planted in [*PLANTED.values(), *HALVES.values()]:
        measured = plant(**{**planted, "settings": {**planted.get("settings", {}), **variant}})
        for finding in Diagnosis(replace(measured, replay=replayed)).findings:
            yield from ((fix, measured) for fix in finding.fixes)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_fix_by_a_setting_has_a_command_that_holds_it(variant, images):
    seen = set()
    for fix, measured in planted_fixes(Replay("slow-20261122-100000-abcd", str(images)), variant):
        assert fix.setting is None or fix.command is not None, fix
        if fix.command is not None and fix.command not in seen:
            seen.add(fix.command)
            *before, last = [main.read(words[1:]) for words in split(shlex.split(fix.command))]
            assert [options.command for options in before] == ["prepare"] * bool(fix.first)
            assert (last.command, last.run) == ("replay", fix.run)
            job, _ = job_of(measured, images, **variant)
            changed, problems = yaml_file.override(yaml_file.Config("job", job.model_dump()), last.overrides)
            assert problems == [] and {key: value_at(changed.values, key) for key in fix.keys} == fix.keys
    assert len(seen) > 20


@pytest.mark.parametrize("place", [None, "s3://amzn-s3-demo-bucket/runs/planted/checkpoints"])
def test_a_teachers_cache_comes_with_a_place_that_keeps_it(place):
    replayed = Replay("slow-20261122-100000-abcd", checkpoints=place)
    caches = [fix for fix, _ in planted_fixes(replayed, {}) if fix.setting == "hyperparameters.teacher_cache"]
    assert caches and {fix.keys.get("checkpoints.s3") for fix in caches} == {place}


def test_a_run_on_sagemaker_without_checkpoints_has_a_place_for_them(images):
    measured = next(made for made in (plant(**one) for one in PLANTED.values()) if made.facts.get("device") == "cuda")
    job, on = job_of(measured, images)
    assert on == "aws" and replay_of(recorded(job, on)).checkpoints == f"{WITH_GPUS['output']}/planted/checkpoints"
    kept = launcher.from_values({**job.model_dump(exclude_unset=True), "checkpoints": "s3://amzn-s3-demo-bucket/kept"})
    assert replay_of(recorded(kept, on)).checkpoints is None


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_fix_of_every_planted_run_can_be_pasted(variant, images):
    runs: dict[str, RunFolder] = {}
    checked = set()
    for planted in [*PLANTED.values(), *HALVES.values()]:
        measured = plant(**{**planted, "settings": {**planted.get("settings", {}), **variant}})
        job, on = job_of(measured, images, **variant)
        kind = f"{on} {job.model_dump()}"
        runs[kind] = runs.get(kind) or recorded(job, on)
        found = Diagnosis(replace(measured, replay=replay_of(runs[kind])))
        for fix in [fix for finding in found.findings for fix in finding.fixes]:
            assert fix.setting is None or fix.command is not None, fix
            if fix.command is not None and fix.command not in checked:
                checked.add(fix.command)
                check(fix)
    assert len(checked) > 20


def test_what_is_no_value_is_advice_and_no_setting():
    for planted in [*PLANTED.values(), *HALVES.values()]:
        for measured in (plant(**planted), replace(plant(**planted), settings={})):
            for fix in [fix for finding in Diagnosis(measured).findings for fix in finding.fixes]:
                if fix.setting is None:
                    assert fix.label == "advice" and not re.match(r"[\w.]+=", str(fix)), fix
                else:
                    assert fix.label == "fix" and not (isinstance(fix.value, str) and " " in fix.value), fix


def test_gpus_without_a_process_get_one_each():
    measured = plant(**PLANTED["uneven_gpus", "mild"], facts={"distribution": "none"})
    compute = {"instance_type": "ml.g5.12xlarge", "max_hours": 1}
    job = {"name": "one", "script": "train_kd.py", **WITH_GPUS, "compute": compute, "hyperparameters": DISTILS}
    folder = recorded(launcher.from_values(job), "aws")
    [finding] = Diagnosis(replace(measured, replay=replay_of(folder))).findings
    assert finding.fixes[0].command == f"launcher replay {folder.name} distribution=torchrun"
    check(finding.fixes[0])
    already = replace(measured, facts={**measured.facts, "distribution": "torchrun"})
    assert Diagnosis(already).findings[0].fixes[0].label == "advice"


@pytest.mark.parametrize("name", WEIRD_NAMES)
def test_a_folder_of_any_name_reaches_the_launcher_as_it_is(name, tmp_path):
    images = drawn(tmp_path / name)
    phases = {**CPU, "data_wait": 0.6}
    measured = plant(phases=phases, cores=2, busy=1.99, settings={"num_workers": 2, "image_size": 224})
    folder = recorded(*job_of(measured, images))
    found = Diagnosis(replace(measured, replay=replay_of(folder)))
    [scaled] = [fix for fix in found.findings[0].fixes if fix.first]
    [preparing, again] = typed(scaled.command)
    assert preparing == ["prepare", str(images), f"{images}-size-224", "--size", "224"]
    assert again[:2] == ["replay", folder.name]
    check(scaled)
    assert f"\n{'':13}{scaled.command}\n" in str(found), "on a line of its own, which nothing breaks"
    shown = [html.unescape(code) for code in re.findall(r"<code>(.*?)</code>", found._repr_html_())]
    assert scaled.command in shown
    [reported] = [fix for fix in found.to_dict()["findings"][0]["fixes"] if fix["command"] == scaled.command]
    assert reported["setting"] is None


def test_what_is_copied_has_all_keys_of_a_fix_where_no_run_can_be_replayed():
    settings = {"num_workers": 2, "preprocessing": "cpu_reference", "augmentation_load": 4}
    found = Diagnosis(plant(phases={**CPU, "data_wait": 0.6}, cores=2, busy=1.99, settings=settings))
    shown = [html.unescape(code) for code in re.findall(r"<code>(.*?)</code>", found._repr_html_())]
    assert "hyperparameters.compose_augmentation=true hyperparameters.preprocessing=cpu" in shown


def test_images_that_are_elsewhere_or_in_shards_already_are_not_prepared_by_a_command(images, tmp_path):
    measured = plant(**PLANTED["storage_bound", "harsh"])
    on_s3 = replay_of(recorded(*job_of(measured, images)))
    prepare(str(images), tmp_path / "shards", shard_size="1MB")
    local = plant(**PLANTED["too_few_workers", "none, on the CPU"])
    in_shards = replay_of(recorded(*job_of(local, tmp_path / "shards")))
    for replayed in (on_s3, in_shards):
        assert replayed is not None and replayed.images is None
        found = Diagnosis(replace(measured, replay=replayed))
        [sharded] = [fix for fix in found.findings[0].fixes if "--shards" in str(fix)]
        assert sharded.command is None and sharded.label == "advice"
        assert "launcher prepare SOURCE TARGET --shards 100MB" in str(found)


def test_what_no_record_says_has_no_command(images, tmp_path, store):
    measured = plant(**PLANTED["too_many_workers", "harsh"])
    folder = recorded(*job_of(measured, images))
    assert replay_of(folder) is not None
    moved = RunFolder(folder.path.rename(tmp_path / folder.name))
    assert replay_of(moved) is None, "launcher replay finds runs of the store"
    back = RunFolder(moved.path.rename(folder.path))
    back.job.unlink()
    assert replay_of(back) is None
    assert not any(fix["command"] for one in Diagnosis(measured).to_dict()["findings"] for fix in one["fixes"])


SCRIPT = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int)
parser.add_argument("--batch", type=int)
args = parser.parse_args()
"""


@pytest.mark.slow
def test_a_line_that_takes_a_key_of_the_config_is_changed_there(script_job, tmp_path):
    """And where no key sets it, the line is all that is named."""
    keys = set()
    for kind, form in [case for case in PLANTED if case[1] in ("mild", "harsh") and PLANTED[case]["phases"]]:
        planted = PLANTED[kind, form]
        measured = plant(**planted)
        values = {
            "workers": measured.settings["num_workers"],
            "batch": measured.settings["global_batch_size"] // len(measured.ranks),
        }
        folder = recorded(script_job(SCRIPT, hyperparameters=values))
        observed(folder.host("algo-1") / "output/data/launcher-observer", planted)
        for fix in [fix for finding in Diagnosis(read(str(folder.path))).findings for fix in finding.fixes]:
            assert fix.command is not None or fix.change or fix.label == "advice", fix
            if fix.command is not None:
                keys |= fix.keys.keys()
                check(fix)
    assert keys == {"hyperparameters.workers", "hyperparameters.batch"}


def diagnosed(
    folder: RunFolder, words: list[str], planted: dict[str, Any], *setups: dict[str, Any], **environment: str
) -> Diagnosis:
    """A planted run of a command, as `launcher watch` records it.

    Args:
        setups: `setup` lines of the observer instead of the usual ones.
    """
    folder.path.mkdir(parents=True)
    observed(folder.host("algo-1") / "output/data/algo-1", planted, *setups)
    return watched(folder, words, **environment)


def watched(folder: RunFolder, words: list[str], **environment: str) -> Diagnosis:
    host = {"name": "algo-1", "command": words, "environment": environment}
    plan = {"name": folder.name, "planned": "2026-11-22T10:00:00+00:00", "backend": "watch", "job": {"name": "mine"}}
    records.write_json(folder.plan, {**plan, "hosts": [host]})
    return Diagnosis(read(str(folder.path)))


def test_a_watched_command_gets_lines_and_advice_and_a_command_for_what_is_set_from_outside(store):
    set_by_command = set()
    for number, case in enumerate(case for case in PLANTED if PLANTED[case]["phases"] is not None):
        workers = str(PLANTED[case].get("settings", {}).get("num_workers", 4))
        words = ["python", "it's my train.py", "--workers", workers]
        environment = {"LAUNCHER_SETTINGS": '{"pin_memory": true, "num_workers": 64}'}
        found = diagnosed(RunFolder(store / f"watched-{number}"), words, PLANTED[case], **environment)
        assert "launcher replay" not in str(found)
        for fix in [fix for finding in found.findings for fix in finding.fixes]:
            changes = outside.changes_of(fix.setting, fix.value)
            assert (fix.command is not None) == bool(changes) and (fix.label == "advice" or fix.change), fix
            if fix.command is not None and changes.keys() - set_by_command:
                assert f"  {fix.command}\n" in str(found) and [*typed(fix.command)] == [["watch", "--", *words]]
                shown = f'launcher() {{ printf "%s" "$LAUNCHER_SETTINGS"; }}; {fix.command}'
                settings = subprocess.run(["bash", "-c", shown], capture_output=True, check=True).stdout
                assert json.loads(settings) == {"pin_memory": True, "num_workers": 64, **changes}
                set_by_command |= changes.keys()
    assert set_by_command == {"num_workers", "matmul_precision", "persistent_workers"}


def test_a_variable_of_a_watched_command_stands_before_it():
    words, environment = ("python", "train.py"), {"LAUNCHER_SETTINGS": '{"num_workers": 1}', "OMP_NUM_THREADS": "8"}
    fix = Fix(setting="environment.OMP_NUM_THREADS", value="4", watched=outside.Watched(words, environment))
    assert (
        fix.command == """LAUNCHER_SETTINGS='{"num_workers": 1}' OMP_NUM_THREADS=4 launcher watch -- python train.py"""
    )
    assert replace(fix, setting="batch_size").command is None


@pytest.mark.parametrize(
    ("stays", "persistent", "taken"), [(False, False, True), (True, False, False), (False, True, True)]
)
def test_a_number_of_workers_that_a_loader_would_not_take_is_no_command(store, stays, persistent, taken):
    """The line of the script is named all the same."""
    made = loader(num_workers=16, workers_stay=stays, persistent_workers=persistent)
    found = diagnosed(RunFolder(store / "watched"), ["python", "train.py"], PLANTED["too_many_workers", "harsh"], made)
    fix = found.findings[0].fixes[0]
    assert fix.setting == "num_workers" and fix.at is not None and (fix.command is not None) == taken
    script = replace(found.evidence.script)
    assert script.takes_workers(0) == (taken and not persistent) and script.takes_workers(1) == taken


def test_the_kits_own_script_in_a_watched_command_takes_what_is_in_the_environment_alone(store):
    """It takes its settings as hyperparameters, and makes its loaders with a worker_init_fn."""
    growing = plant(**PLANTED["gpu_memory_growth", "harsh"], facts={"torch": "2.14.1"})
    folder = RunFolder(store / "watched")
    folder.path.mkdir(parents=True)
    write(growing, folder.host("algo-1") / "output/data/algo-1")
    found = watched(folder, ["python", "train_kd.py"], PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128")
    assert found.evidence.script is None
    by_setting = {fix.setting: fix.command for one in found.findings for fix in one.fixes}
    kept = "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True"
    assert by_setting["environment.PYTORCH_CUDA_ALLOC_CONF"] == f"{kept} launcher watch -- python train_kd.py"
    folder = RunFolder(store / "crowded")
    folder.path.mkdir(parents=True)
    write(plant(**PLANTED["too_many_workers", "harsh"]), folder.host("algo-1") / "output/data/algo-1")
    [fix, *_] = watched(folder, ["python", "train_kd.py"]).findings[0].fixes
    assert fix.setting == "hyperparameters.num_workers" and fix.command is None


def test_the_end_of_a_watched_command_says_the_command_to_paste(store, capsys):
    folder = RunFolder(store / "watched")
    [fix, *_] = diagnosed(folder, ["python", "train.py"], PLANTED["too_many_workers", "harsh"]).findings[0].fixes
    records.write_json(folder.outcome, {"state": records.COMPLETED, "seconds": 18.0})
    _report(Ended(Run(folder), 0, left=False, hung_up=False), None)
    assert f"     fix: {fix}\n     {fix.command}\n" in capsys.readouterr().err and fix.command is not None


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["python", "train.py", "--token", "***"], {}),
        (["python", "train.py"], {"LAUNCHER_SETTINGS": "***"}),
        ([], {}),
    ],
    ids=["a redacted word", "a redacted variable", "not recorded"],
)
def test_a_command_that_is_not_recorded_whole_is_not_made_up(store, words, environment):
    found = diagnosed(RunFolder(store / "watched"), words, PLANTED["too_many_workers", "harsh"], **environment)
    assert found.findings and all(fix.command is None for finding in found.findings for fix in finding.fixes)


def test_a_fix_that_the_run_has_already_is_not_advised():
    starved = dict(phases=GPU, gap=0.1, gpu=40)
    plain, compiled = (Diagnosis(plant(**starved, settings=more)).findings[0] for more in ({}, {"compile": True}))
    assert plain.kind == compiled.kind == "gpu_starved"
    assert [fix.setting for fix in plain.fixes] == ["hyperparameters.compile", "hyperparameters.profile_steps"]
    assert [fix.setting for fix in compiled.fixes] == ["hyperparameters.profile_steps"]
    neither = Diagnosis(plant(**starved, settings={"compile": True, "profile_steps": 5})).findings[0]
    assert [fix.label for fix in neither.fixes] == ["advice"] and "--probe" in str(neither.fixes[0])


def test_an_allocator_that_does_not_know_a_setting_is_not_given_it():
    growing = PLANTED["gpu_memory_growth", "harsh"]
    for version, known in (("2.0.1", False), ("1.13.1", False), ("2.1.0", True), ("2.10.0", True)):
        fixes = Diagnosis(plant(**growing, facts={"torch": version})).findings[0].fixes
        assert any(fix.setting == "environment.PYTORCH_CUDA_ALLOC_CONF" for fix in fixes) == known, version


def test_the_allocators_other_settings_stay_and_one_that_is_set_is_not_advised():
    growing = PLANTED["gpu_memory_growth", "harsh"]
    for now, advised in (
        (None, "expandable_segments:True"),
        ("max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True"),
        ("expandable_segments:False", None),
    ):
        fixes = (
            Diagnosis(plant(**growing, facts={"environment": {"PYTORCH_CUDA_ALLOC_CONF": now} if now else {}}))
            .findings[0]
            .fixes
        )
        assert [fix.value for fix in fixes if fix.setting] == ([advised] if advised else [])


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ({"worker_type": "processes", "num_workers": 2}, True),
        ({"worker_type": "auto", "num_workers": 2}, True),  # on a GPU
        ({"worker_type": "threads", "num_workers": 2}, False),
        ({"worker_type": "processes", "num_workers": 0}, False),
    ],
)
def test_threads_are_advised_against_growth_only_where_worker_processes_run(settings, advised):
    found = Diagnosis(plant(**PLANTED["memory_growth", "harsh"], settings=settings)).findings[0]
    assert ("hyperparameters.worker_type" in [fix.setting for fix in found.fixes]) == advised
