"""Diagnosis of a script that the observer watched: its findings name the line to change, and only what such a script can change."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from launcher.insight import windows
from launcher.insight.comparison import Comparison
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.measurements import read
from launcher.insight.rules.script_fixes import ARGUMENTS
from launcher.insight.rules.table import RULES, judge
from tests.insight.observed import loader, observed, sampled, setup
from tests.insight.planted import BEGAN, plant, write
from tests.insight.test_rules import CPU, GPU, HEALTHY, PLANTED

EVALUATION = setup(
    "loader", 50, "held_out = DataLoader(test)", id=2, role="evaluation", batch_size=8, num_workers=0, pin_memory=False
)


def diagnosed(tmp_path, planted, *setups, lines=None) -> Diagnosis:
    return Diagnosis(observed(tmp_path / "run", planted, *setups, lines=lines))


ADDRESSES = {
    "too many workers": (
        "too_many_workers", PLANTED["too_many_workers", "harsh"], [], [],
        "train.py:42", "DataLoader(num_workers=16) at train.py:42: set num_workers=2 (enough",
    ),
    "too few workers": (
        "too_few_workers", PLANTED["too_few_workers", "harsh"], [], [],
        "train.py:42", "DataLoader(num_workers=1) at train.py:42: set num_workers=",
    ),
    "no workers at all": (
        "too_few_workers", PLANTED["too_few_workers", "none, on the CPU"],
        [], [sampled(14, "image = heavy(image)", 60, "data_wait")],
        "train.py:42", "DataLoader(num_workers=0) at train.py:42: set num_workers=",
    ),
    "a loader that transformers makes": (
        "too_many_workers", PLANTED["too_many_workers", "harsh"], [loader("transformers", num_workers=16)], [],
        "train.py:42", "TrainingArguments(dataloader_num_workers=2), used at train.py:42",
    ),
    "a loader that a library makes": (
        "too_many_workers", PLANTED["too_many_workers", "harsh"], [loader("torchdistill", num_workers=16)], [],
        "train.py:42", "the DataLoader that torchdistill makes at train.py:42: set num_workers=2 (now 16)",
    ),
    "costly images, made by workers": (
        "data_bound", PLANTED["data_bound", "harsh"], [], [],
        "food.py:12", "less work for each sample of Food, at food.py:12: smaller images",
    ),
    "costly images, made by the training process": (
        "data_bound", dict(phases={**CPU, "data_wait": 0.3}, cores=1, busy=0.99, settings={"num_workers": 0}),
        [], [sampled(14, "image = blur(image)", 40, "data_wait", package="PIL"), sampled(15, "x", 5, "data_wait")],
        "train.py:14", "`image = blur(image)` at train.py:14 takes 40 % of the training thread's time",
    ),
    "slow storage": (
        "storage_bound", PLANTED["storage_bound", "harsh"], [], [],
        "food.py:12", "less work for each sample of Food, at food.py:12: one file for many samples",
    ),
    "a dataset of a package": (
        "data_bound", PLANTED["data_bound", "harsh"],
        [loader(num_workers=8, dataset={"class": "ImageFolder", "file": "/v/site-packages/torchvision/a.py", "line": 2})],
        [], "train.py:42", "less work for each sample of ImageFolder, at train.py:42",
    ),
    "slow copies": (
        "host_to_device_bound", PLANTED["host_to_device_bound", "harsh"], [], [],
        "train.py:69",
        "non_blocking=True in `images = images.to(device)` at train.py:69, from pinned memory: "
        "DataLoader(pin_memory=True) at train.py:42",
    ),
    "fp32 on a device that is not NVIDIA's": (
        "fp32_compute", {**PLANTED["fp32_compute", "harsh"], "facts": {"device": "xpu"}}, [], [],
        "train.py:71", "torch.autocast('xpu', dtype=torch.bfloat16) around `out = model(images)` at train.py:71 and the loss",
    ),
    "fp32 under Lightning": (
        "fp32_compute", PLANTED["fp32_compute", "harsh"],
        [setup("model", 80, "trainer.fit(model)", via="lightning", trainable=1)], [],
        "train.py:80", 'Trainer(precision="bf16-mixed"), used at train.py:80',
    ),
    "fp32 under Accelerate": (
        "fp32_compute", PLANTED["fp32_compute", "harsh"],
        [setup("backward", 72, "accelerator.backward(loss)", via="accelerate")], [],
        "train.py:71", 'Accelerator(mixed_precision="bf16"), used at train.py:71',
    ),
    "fp32 under transformers, which uses accelerate": (
        "fp32_compute", PLANTED["fp32_compute", "harsh"],
        [
            setup("backward", 60, "trainer.train()", via="accelerate"),
            setup("model", 60, "trainer.train()", via="transformers", trainable=1),
        ], [], "train.py:60", "TrainingArguments(bf16=True), used at train.py:60",
    ),
    "a number read at every step": (
        "synchronising_calls", dict(phases=GPU, gap=0.1, gpu=40, cpu_seconds=0.3),
        [], [sampled(88, "total += loss.item()", 55, None)],
        "train.py:88", "`total += loss.item()` at train.py:88 waits for the GPU at every step",
    ),
    "Python in the loop, on the CPU": (
        "main_thread_bound", dict(phases={**CPU, "student_forward": 0.2}, busy=3.0),
        [], [sampled(66, "draw(images)", 40, "forward"), sampled(71, "out = model(x)", 30, "forward", in_model=True)],
        "train.py:66", "`draw(images)` at train.py:66 takes 40 % of the training thread's time: move it out of the step",
    ),
    "Python in Lightning's training step, a closure of the optimizer": (
        "main_thread_bound", dict(phases={**CPU, "optimizer": 0.03}, gap=0.03, busy=3.0),
        [], [sampled(66, "draw(images)", 40, "optimizer"), sampled(80, "fit()", 30, "optimizer", package="lightning")],
        "train.py:66", "`draw(images)` at train.py:66 takes 40 %",
    ),
    "Python between the phases": (
        "main_thread_bound", PLANTED["main_thread_bound", "on the CPU"],
        [], [sampled(95, "log(metrics)", 30, None)],
        "train.py:95", "`log(metrics)` at train.py:95 takes 30 % of the training thread's time",
    ),
    "a small batch": (
        "small_batch", PLANTED["small_batch", "harsh"], [], [],
        "train.py:42", "DataLoader(batch_size=2) at train.py:42: set batch_size=8",
    ),
    "a small batch on the CPU": (
        "small_batch", PLANTED["small_batch", "on the CPU"], [], [],
        "train.py:42", "DataLoader(batch_size=2) at train.py:42: set batch_size=8",
    ),
    "checkpoints": (
        "checkpoint_stalls", PLANTED["checkpoint_stalls", "harsh"], [], [],
        "train.py:90", "`torch.save(model.state_dict(), 'model.pt')` at train.py:90: once in about",
    ),
    "checkpoints of transformers": (
        "checkpoint_stalls", PLANTED["checkpoint_stalls", "harsh"],
        [loader("transformers"), setup("checkpoint", 60, "trainer.train()", via="safetensors")], [],
        "train.py:60", 'TrainingArguments(save_strategy="steps", save_steps=',
    ),
    "evaluations": (
        "evaluation_stalls", PLANTED["evaluation_stalls", "mild"], [loader(batch_size=256), EVALUATION], [],
        "train.py:50", "evaluate 4 times less often, with the batches of `held_out = DataLoader(test)` at train.py:50",
    ),
    "evaluations without a loader": (
        "evaluation_stalls", PLANTED["evaluation_stalls", "mild"],
        [loader(batch_size=256), setup("evaluation", 55, "model.eval()")], [],
        "train.py:55", "evaluate 4 times less often, begun by `model.eval()` at train.py:55",
    ),
    "workers that start with every epoch": (
        "slow_epoch_starts", PLANTED["slow_epoch_starts", "harsh"], [], [],
        "train.py:42", "DataLoader(persistent_workers=False) at train.py:42: set persistent_workers=True",
    ),
    "a few slow steps": (
        "step_outliers", PLANTED["step_outliers", "mild"],
        [], [sampled(77, "time.sleep(4)", 20, None)],
        "train.py:77", "`time.sleep(4)` at train.py:77 takes 20 %",
    ),
    "a slow rank": (
        "slow_rank", PLANTED["slow_rank", "mild"],
        [], [sampled(60, "augment(images)", 40)], "train.py:63", "`augment(images)` at train.py:63 takes 40 %",
    ),
    "the exchange of gradients": (
        "communication_bound", {**PLANTED["communication_bound", "harsh"], "gpu_memory": 40},
        [setup("data_parallel", 25, "model = DDP(model)", world_size=16, **{"class": "DistributedDataParallel"})], [],
        "train.py:42", "DataLoader(batch_size=16) at train.py:42: set batch_size=32",
    ),
    "the exchange of gradients, on full memory": (
        "communication_bound", {**PLANTED["communication_bound", "harsh"], "gpu_memory": 60},
        [setup("data_parallel", 25, "model = DDP(model)", world_size=16, **{"class": "DistributedDataParallel"})], [],
        "train.py:25", "sum the gradients of 2 batches before each step: GPU memory cannot hold 2 times the images at once",
    ),
    "a quota": (
        "cpu_throttled", {**PLANTED["cpu_throttled", "mild"], "settings": {"num_workers": 4}}, [], [],
        "train.py:42", "a larger quota (docker --cpus)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ADDRESSES)
def test_a_finding_names_the_line_to_change(case, tmp_path):
    kind, planted, setups, lines, at, words = ADDRESSES[case]
    found = diagnosed(tmp_path, planted, *setups, lines=lines)
    top = found.findings[0]
    assert top.kind == kind, str(found)
    assert str(top.at) == at and str(top.fixes[0]).startswith(words), str(found)
    reported = json.loads(json.dumps(found.to_dict()))["findings"][0]
    assert f"{reported['at']['file']}:{reported['at']['line']}" == at
    assert f"at {at} (" in found.headline and f", at {at} " in found._repr_html_()


def test_a_number_that_a_probe_measured_replaces_the_advised_one(tmp_path):
    _, planted, setups, lines, *_ = ADDRESSES["too many workers"]
    fix = diagnosed(tmp_path, planted, *setups, lines=lines).findings[0].fixes[0]
    reported = str(fix.set_to(1, "measured by the probe"))
    assert reported == "DataLoader(num_workers=16) at train.py:42: set num_workers=1 (measured by the probe)"


def test_what_the_script_does_already_is_not_advised(tmp_path):
    starved, compiled = dict(phases=GPU, gap=0.1, gpu=40), setup("compile", 21, "model = torch.compile(model)")
    plain, already = (diagnosed(tmp_path / str(len(more)), starved, *more).findings[0] for more in ([], [compiled]))
    assert plain.kind == already.kind == "gpu_starved"
    assert "torch.compile" in str(plain.fixes[0]) and "torch.compile" not in str(already.fixes)


def test_a_wait_of_no_workers_also_names_the_slow_line_of_the_dataset(tmp_path):
    _, planted, setups, lines, *_ = ADDRESSES["no workers at all"]
    fixes = diagnosed(tmp_path, planted, *setups, lines=lines).findings[0].fixes
    assert "`image = heavy(image)` at train.py:14 takes 60 %" in str(fixes[-1])


def test_where_no_line_calls_the_model_autocast_ends_before_the_backward_pass(tmp_path):
    hidden = setup("model", 73, "optimizer.step()", trainable=1, **{"class": "Net"})
    fix = diagnosed(tmp_path, PLANTED["fp32_compute", "harsh"], hidden).findings[0].fixes[0]
    assert "around the forward pass and the loss, before `loss.backward()` at train.py:72" in str(fix)


def test_a_line_that_holds_a_secret_is_named_without_its_text(tmp_path):
    key = "AKIA" + "QF7X2PL5MZ3KW6TD"
    report = diagnosed(tmp_path, ADDRESSES["no workers at all"][1], lines=[sampled(14, f"fetch('{key}')", 60)])
    assert "train.py:14" in str(report) and key not in json.dumps(report.to_dict(), default=str)


def test_a_tf32_fix_stands_before_the_loop(tmp_path):
    _, planted, setups, lines, *_ = ADDRESSES["fp32 on a device that is not NVIDIA's"]
    planted = {**planted, "facts": {"compute_capability": 8.0}}
    fixes = diagnosed(tmp_path, planted, *setups, lines=lines).findings[0].fixes
    assert (
        "torch.set_float32_matmul_precision('high') before `optimizer = SGD(model.parameters())` at train.py:20"
        in str(fixes[1])
    )


def test_autocast_and_tf32_are_no_fp32(tmp_path):
    planted = PLANTED["fp32_compute", "harsh"]
    for number, values in enumerate(({"autocast": "bfloat16"}, {"matmul_precision": "high"}, {"allow_tf32": True})):
        found = diagnosed(tmp_path / str(number), planted, setup("precision", 72, "loss.backward()", **values))
        assert found.findings == (), values


DEFAULTS = {"autocast": None, "matmul_precision": "highest", "allow_tf32": False, "cudnn_allow_tf32": True}


def in_torchs_defaults(tmp_path, layers: dict[str, int], switches=DEFAULTS, **facts):
    """The finding on a busy GPU in torch's default precision, of a model with these layers."""
    model = setup("model", 71, "out = model(images)", trainable=10, dtype="float32", **{"class": "ResNet", **layers})
    precision = setup("precision", 72, "loss.backward()", **switches)
    measured = observed(tmp_path, PLANTED["fp32_compute", "harsh"], model, precision)
    [found] = Diagnosis(replace(measured, facts={**measured.facts, "compute_capability": 8.0, **facts})).findings
    assert found.kind == "fp32_compute"
    return found


def test_a_network_whose_convolutions_run_in_tf32_by_default_is_not_told_that_tensor_cores_idle(tmp_path):
    found = in_torchs_defaults(tmp_path, {"convolutions": 53, "matrices": 1})
    assert "tensor cores are in use" in found.cause and "torch.backends.cudnn.allow_tf32" in found.evidence[1]
    assert [fix.value for fix in found.fixes] == ["bf16"] and "autocast" in str(found.fixes[0])
    assert "set_float32_matmul_precision" not in str(found)
    assert found.gain.expected is None and 1 < found.gain.at_most <= 2 and found.share == found.gain.share


@pytest.mark.parametrize(
    ("layers", "switches", "facts", "values"),
    [
        ({"convolutions": 1, "matrices": 49}, DEFAULTS, {}, ["bf16", "tf32"]),  # a ViT's patches
        ({"convolutions": 53, "matrices": 1}, {**DEFAULTS, "cudnn_allow_tf32": False}, {}, ["bf16", "tf32"]),
        ({"convolutions": 53, "matrices": 1}, DEFAULTS, {"compute_capability": 7.0}, ["fp16"]),  # no TF32
        ({"convolutions": 53, "matrices": 1}, DEFAULTS, {"device": "xpu"}, ["bf16", "tf32"]),
        # earlier observers recorded neither
        ({}, DEFAULTS, {}, ["bf16", "tf32"]),
        ({"convolutions": 53, "matrices": 1}, {"allow_tf32": False}, {}, ["bf16", "tf32"]),
    ],
    ids=str,
)
def test_arithmetic_that_no_tf32_covers_is_still_fp32(tmp_path, layers, switches, facts, values):
    found = in_torchs_defaults(tmp_path, layers, switches, **facts)
    assert found.title == "The GPU computes in fp32" and [fix.value for fix in found.fixes] == values
    assert found.gain.expected is not None


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "fully_shard"])
def test_a_model_whose_sharding_has_a_policy_of_its_own_is_not_said_to_compute_in_fp32(tmp_path, name):
    sharded = setup("data_parallel", 25, "model = FSDP(model)", world_size=4, **{"class": name})
    found = diagnosed(tmp_path, PLANTED["fp32_compute", "harsh"], sharded)
    assert found.findings == ()
    [missing] = [one for one in found.report.not_measured if one.what == "arithmetic in fp32"]
    assert missing.reason == "the precision of this run is not known"


def test_a_frozen_model_is_a_teacher_that_is_not_measured(tmp_path):
    both = [setup("model", 20 + i, "m", id=i, trainable=10 * i, **{"class": f"Net{i}"}) for i in (0, 1)]
    found = diagnosed(tmp_path, dict(phases=GPU, gpu=96), *both)
    [missing] = [one for one in found.report.not_measured if "teacher" in one.what]
    assert "Net0 is timed together with the trained model's" in missing.reason
    assert found.measurements.script.trained_model.at.line == 21


NAMED = {
    **{case: [] for case in PLANTED if case[0] == "teacher_bound"},  # a teacher is part of the forward pass
    ("synchronising_calls", "mild"): ["gpu_starved"],  # nothing was sampled
}
"""The findings of planted runs that the observer cannot tell as the kit's own record does."""

STEPS = [
    case
    for case, planted in (PLANTED | HEALTHY).items()
    if planted["phases"] is not None and planted.get("servers") is None
]


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_every_rule_answers_and_no_fix_is_one_of_the_kits_settings(case, tmp_path):
    found = diagnosed(tmp_path, (PLANTED | HEALTHY)[case])
    report = found.report
    answers = (report.findings, report.not_found, report.not_measured, report.not_applicable)
    assert sum(map(len, answers)) == len(RULES) + 1
    text = str(found)
    for words in ("hyperparameters.", "launcher prepare", "log_every", "kit's scripts", "dali", "teacher_cache"):
        assert words not in text, text
    for finding in found.findings:
        assert finding.fixes, finding
    assert max(len(line) for line in text.splitlines()) <= 130
    expected = [] if case in HEALTHY else NAMED.get(case, [case[0]])
    assert [finding.kind for finding in found.findings][:1] == expected, text


CROWD = dict(phases={**CPU, "data_wait": 0.6}, cores=2, busy=1.9, settings={"num_workers": 16})


def test_two_observed_runs_show_whether_the_fix_worked(tmp_path):
    before, after = (
        diagnosed(tmp_path / "a", CROWD),
        diagnosed(tmp_path / "b", {**CROWD, "phases": CPU, "settings": {"num_workers": 2}}),
    )
    both = Comparison(before, after)
    [kept] = both.kept()
    assert (kept.setting, kept.before, kept.after) == ("num_workers", 16, 2) and kept.obtained.value > 2
    assert ("num_workers", 16, 2) in both.changed()


def test_without_a_dataloader_its_rules_say_that_none_was_seen(tmp_path):
    observed(tmp_path, dict(phases=CPU, cores=2, busy=1.5))
    file = tmp_path / "algo-1/timeline-0.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [event for event in events if event.get("of") != "loader"]
    for event in kept:
        if event["kind"] == "steps":
            event["seconds"].pop("data_wait")
            event["extra"].pop("images_per_second", None)
    reported = {"kind": "not_measured", "what": "data_wait", "why": "no torch DataLoader was seen"}
    file.write_text("".join(json.dumps(event) + "\n" for event in [*kept, reported]))
    report = Diagnosis(read(str(tmp_path))).report
    unseen = {one.what for one in report.not_measured if one.reason == reported["why"]}
    assert unseen == {
        "waiting for data",
        "pauses at the start of epochs",
        "time of the training process outside all phases",
    }


def test_a_run_whose_steps_were_not_observed_says_why(tmp_path):
    write(plant(phases=None, busy=7.9, gpu=50), tmp_path)
    found = Diagnosis(read(str(tmp_path)))
    assert (
        found.findings[0].kind == "data_bound"
        and "hyperparameters." not in str(found)
        and "launcher prepare" not in str(found)
    )
    assert "no step of a torch optimizer was observed" in str(found)


def test_a_slow_step_is_one_step_however_many_quick_ones_fill_a_window():
    """Windows of half a second: 60 quick steps, or a single slow one."""
    planted = plant(phases=CPU, steps=200, log_every=10, noise=0.0)
    [steps] = planted.ranks
    slow = np.arange(len(steps.step)) % 2 == 0
    steps.extra["steps"] = np.where(slow, 1.0, 60.0)
    steps.step[:] = np.cumsum(steps.extra["steps"])
    steps.seconds["step"][:] = np.where(slow, 0.6, 0.01)
    steps.ended[:] = BEGAN + np.cumsum(steps.seconds["step"] * steps.extra["steps"])
    assert windows.far(steps).tolist() == (slow & windows.steady(steps)).tolist()
    top = judge(Evidence(replace(planted, facts={}))).findings[0]
    assert top.kind == "step_outliers" and "median of 0.01 s" in top.evidence[0]


SOURCES = {
    "TrainingArguments": ("transformers", "training_args.py"),
    "Trainer": ("lightning", "pytorch/trainer/trainer.py"),
    "ModelCheckpoint": ("lightning", "pytorch/callbacks/model_checkpoint.py"),
    "Accelerator": ("accelerate", "accelerator.py"),
}


def test_a_frameworks_own_names_are_those_of_the_installed_one():
    for arguments in ARGUMENTS.values():
        for text in arguments.values():
            name, argument = re.match(r"(\w+)\((\w+)=", text).groups()
            package, file = SOURCES[name]
            source = Path(find_spec(package).origin).parent / file
            assert re.search(rf"^ +{argument}:", source.read_text(), re.MULTILINE), text
