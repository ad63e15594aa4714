"""A rule's fix in terms of a script that is not the kit's: each form that a line, a framework or a command gives it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, Fix
from launcher.insight.gains import bounded
from launcher.insight.rules.script_fixes import for_script
from launcher.insight.script import Address, Part, SampledLine, Script
from tests.insight.planted import plant
from tests.insight.test_rules import CPU

NOTHING = "see in which lines of the script the training thread spends its time"


def part(of: str, line: int, text: str = "", via: str | None = None, **values: Any) -> Part:
    return Part(of=of, at=Address("train.py", line, text), values=values, via=via)


def loader(via: str | None = None, text: str = "", line: int = 42, **values: Any) -> Part:
    return part("loader", line, text, via, **{"role": "training", "num_workers": 4, **values})


def line(number: int, share: float, phase: str | None = None, file: str = "train.py") -> SampledLine:
    return SampledLine(at=Address(file, number, "work()"), phase=phase, package=None, in_model=False, share=share)


def fixes(*parts: Part, fix: Fix | None = None, kind: str = "any", planted: dict[str, Any] | None = None, **script: Any) -> list[Fix]:  # fmt: skip
    """What a finding of a kind with one fix, three tenths of the time, becomes for a script with these parts."""
    given = () if fix is None else (fix,)
    finding = Finding(kind=kind, title="", share=0.3, evidence=("",), cause="", fixes=given, rank=1)
    run = plant(**{"phases": CPU, "noise": 0.0, **(planted or {})})
    seen = Script(parts=parts, **script)
    return [*for_script(finding, Evidence(dataclasses.replace(run, script=seen))).fixes]


def reported(*parts: Part, **more: Any) -> str:
    [fix] = fixes(*parts, **more)
    return str(fix)


def kit(name: str, value: Any, now: Any = None) -> Fix:
    return Fix(setting=f"hyperparameters.{name}", value=value, now=now)


# What is left out


@pytest.mark.parametrize(
    ("scope", "by_launcher", "kept"),
    [("any", False, True), ("any", True, True), ("job", False, False), ("job", True, True), ("kit", True, False)],
)
def test_advice_is_for_those_who_can_follow_it(scope, by_launcher, kept):
    advice = Fix(setting=None, value="another input mode", scope=scope)
    assert reported(fix=advice, by_launcher=by_launcher) == ("another input mode" if kept else NOTHING)


@pytest.mark.parametrize(
    ("fix", "kept"),
    [
        (kit("num_workers", 2, now=4), True),
        (kit("num_workers", 4, now=4), False),
        (kit("compile", True, now=True), False),
        (kit("checkpoint_every", 100), True),
        (kit("teacher_cache", {"views": 1}), False),
    ],
    ids=str,
)
def test_a_setting_of_the_kits_is_kept_where_a_script_has_it_otherwise(fix, kept):
    assert (reported(loader(), fix=fix) != NOTHING) == kept


@pytest.mark.parametrize(("now", "kept"), [(None, True), (True, False)])
def test_the_gain_of_a_fix_that_a_script_has_already_goes_with_it(now, kept):
    gain = bounded(0.3, "what compiling saves is not known")
    fixes = (kit("compile", True, now), Fix(setting=None, value="a profile"))
    finding = Finding(kind="any", title="", share=0.3, evidence=("",), cause="", fixes=fixes, gain=gain, rank=1)
    run = dataclasses.replace(plant(phases=CPU, noise=0.0), script=Script(parts=()))
    found = for_script(finding, Evidence(run))
    assert len(found.fixes) == 1 + kept and (found.gain == gain) == kept
    assert ("compiling" in found.gain.formula) == kept and found.gain.share == 0.3


@pytest.mark.parametrize(
    ("now", "by_launcher", "said"),
    [
        (8, True, "environment.OMP_NUM_THREADS=2 (now 8)"),
        (8, False, "OMP_NUM_THREADS=2 in the environment of the command, now 8"),
        (None, False, "OMP_NUM_THREADS=2 in the environment of the command"),
    ],
)
def test_an_environment_variable_is_a_key_of_the_config_or_the_commands(now, by_launcher, said):
    fix = Fix(setting="environment.OMP_NUM_THREADS", value=2, now=now)
    assert reported(fix=fix, by_launcher=by_launcher) == said
    [kept] = fixes(fix=fix, by_launcher=by_launcher)
    assert kept.label == "fix" and (kept.setting, kept.value) == (fix.setting, 2), "`launcher tune` can set it"
    assert reported(fix=Fix(setting="distribution", value="torchrun")) == "distribution=torchrun"


# DataLoader


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "DataLoader(num_workers=2)"),
        ([loader()], "DataLoader(num_workers=4) at train.py:42: set num_workers=2"),
        ([loader("transformers")], "TrainingArguments(dataloader_num_workers=2), used at train.py:42"),
        ([loader("other")], "the DataLoader that other makes at train.py:42: set num_workers=2 (now 4)"),
        ([loader(role="evaluation")], "DataLoader(num_workers=2)"),
    ],
    ids=["no loader", "its own", "transformers'", "a library's", "that of evaluations"],
)
def test_workers_are_set_where_the_loader_is_made(parts, said):
    assert reported(*parts, fix=kit("num_workers", 2)) == said


@pytest.mark.parametrize(("usable", "workers"), [(3.7, 3), (0.5, 1)])
def test_as_many_workers_as_there_are_cores(usable, workers):
    fix = kit("num_workers", "auto")
    assert reported(loader(), fix=fix, planted={"usable": usable}).endswith(f"set num_workers={workers}")
    assert "num_workers" not in reported(loader(), fix=fix, planted={"system": False}), "nobody knows the cores"


def test_the_workers_of_two_loaders_a_step_count_together():
    """A watched command's setting would give each of them that many."""
    both = (
        loader(num_workers=1),
        part("loader", 43, "DataLoader(unlabelled)", role="training", batch_size=448, num_workers=3),
    )
    assert Script(parts=both).settings()["num_workers"] == 4
    assert Script(parts=(*both, loader(num_workers=1))).settings()["num_workers"] == 4, "made anew for each epoch"
    said = reported(*both, fix=kit("num_workers", 8, now=4))
    assert said == "8 data workers in all (now 4), of the DataLoaders at train.py:42 and train.py:43"


def test_two_loaders_a_step_make_no_parts_of_a_batch():
    """As FixMatch's do, of labelled and of unlabelled images."""
    fix = kit("global_batch_size", 2048, now=512)
    both = (loader(batch_size=64), part("loader", 43, "DataLoader(unlabelled)", role="training", batch_size=448))
    assert reported(*both, fix=fix, planted={"settings": {"global_batch_size": 512}}).startswith("a larger batch")
    assert Script(parts=both).settings().get("batch_size_per_device") is None
    assert Script(parts=both[:1]).settings()["batch_size_per_device"] == 64


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"global_batch_size": 256}, "DataLoader(batch_size=128) at train.py:42: set batch_size=512"),
        ({"global_batch_size": 256, "batch_size_per_device": 32}, "batch_size=32) at train.py:42: set batch_size=128"),
        ({"global_batch_size": None, "batch_size_per_device": 32}, "a larger batch"),
        ({"global_batch_size": None}, "a larger batch"),
    ],
    ids=str,
)
def test_a_larger_batch_is_one_of_each_process(settings, said):
    """Four times the images of two processes."""
    planted = {"ranks": 2, "settings": settings}
    assert said in reported(loader(), fix=kit("global_batch_size", 1024, now=256), planted=planted)


def test_fewer_parts_are_larger_batches():
    planted = {"settings": {"global_batch_size": 256, "batch_size_per_device": 32}}
    said = reported(loader(), fix=kit("batch_size_per_device", "auto", now=32), planted=planted)
    assert "DataLoader(batch_size=32) at train.py:42: set batch_size=256" in said and "accumulate 8 times fewer" in said
    crowded = {**planted, "gpu": 60, "gpu_memory": 30}
    said = reported(loader(), fix=kit("batch_size_per_device", "auto", now=32), planted=crowded)
    assert "set batch_size=64" in said and "accumulate 2 times fewer" in said, (
        "memory holds 3.3 times as many, in halves of a step"
    )
    unknown = {"settings": {"global_batch_size": None}}
    assert "set batch_size=1" in reported(loader(), fix=kit("batch_size_per_device", "auto"), planted=unknown)


TEXT = "loader = DataLoader(data, num_workers=args.workers)"


@pytest.mark.parametrize(
    ("arguments", "text", "named"),
    [
        ({"workers": 4}, TEXT, True),
        ({"workers": "4", "depth": 4}, TEXT, True),
        ({"workers": 8}, TEXT, False),
        ({"workers": 4, "num_workers": 4}, TEXT, False),
        ({"depth": 4}, TEXT, False),
        ({"workers": 4}, "loader = DataLoader(data, num_workers=4)", False),
        ({"data-workers": 4}, "DataLoader(data, num_workers=args.data_workers)", True),
    ],
    ids=str,
)
def test_an_argument_of_the_script_is_named_where_the_line_takes_it(arguments, text, named):
    given = dict(fix=kit("num_workers", 2), planted={"settings": {"num_workers": 4}}, arguments=arguments)
    [config] = fixes(loader(text=text), by_launcher=True, **given)
    name = next(iter(arguments))
    assert config.key == (f"hyperparameters.{name}" if named else None)
    assert (f", in the config hyperparameters.{name}=2" in str(config)) == named
    [command] = fixes(loader(text=text), **given)
    assert command.key is None and (f", in the command --{name}=2" in str(command)) == named


def test_arguments_are_of_no_use_without_a_loader_or_for_what_they_do_not_name():
    given = dict(planted={"settings": {"num_workers": 4}}, arguments={"workers": 4})
    assert reported(fix=kit("num_workers", 2), **given) == "DataLoader(num_workers=2)"
    kept, *_ = fixes(loader(text=TEXT), kind="slow_epoch_starts", **given)
    assert "persistent_workers=True (the" in str(kept)


# Precision and compiling


MODEL = part("model", 71, "out = model(images)", trainable=10)
STEP, BACKWARD = part("step", 73, "optimizer.step()"), part("backward", 72, "loss.backward()")


@pytest.mark.parametrize(
    ("parts", "value", "said"),
    [
        ([MODEL, STEP], "bf16", "dtype=torch.bfloat16) around `out = model(images)` at train.py:71 and the loss"),
        ([MODEL], "fp16", "dtype=torch.float16) around `out = model(images)` at train.py:71 and the loss, with torch.amp.GradScaler around backward and step: small gradients are 0 in fp16"),
        (
            [part("model", 73, "optimizer.step()", trainable=10), STEP, BACKWARD],
            "bf16",
            "around the forward pass and the loss, before `loss.backward()` at train.py:72",
        ),
        ([STEP], "bf16", "dtype=torch.bfloat16) around the forward pass and the loss"),
        ([part("model", 60, via="transformers", trainable=1)], "bf16", "TrainingArguments(bf16=True), used at train.py:60"),
        ([part("backward", 60, via="accelerate")], "bf16", 'Accelerator(mixed_precision="bf16")'),
        ([part("optimizer", 20, "SGD()")], "tf32", "torch.set_float32_matmul_precision('high') before `SGD()` at train.py:20"),
        ([], "tf32", "torch.set_float32_matmul_precision('high')"),
    ],
)  # fmt: skip
def test_precision_is_set_around_the_forward_pass_or_by_the_framework(parts, value, said):
    assert reported(*parts, fix=kit("precision", value, now="fp32")).endswith(said)


def test_autocast_is_for_the_runs_own_device():
    for device, name in (("xpu", "xpu"), (None, "cuda")):
        said = reported(MODEL, fix=kit("precision", "bf16"), planted={"facts": {"device": device}})
        assert said.startswith(f"torch.autocast('{name}'")


@pytest.mark.parametrize(
    ("parts", "value", "said"),
    [
        ([MODEL], True, "model = torch.compile(model) before `out = model(images)` at train.py:71"),
        ([], True, "model = torch.compile(model)"),
        ([part("compile", 30), MODEL], False, "no torch.compile at train.py:30"),
        ([MODEL], False, "no torch.compile"),
        ([part("model", 60, via="transformers", trainable=1)], True, "TrainingArguments(torch_compile=True), used at train.py:60"),
    ],
)  # fmt: skip
def test_a_model_is_compiled_before_its_first_call(parts, value, said):
    assert reported(*parts, fix=kit("compile", value, now=not value)) == said


# Pauses


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part("checkpoint", 90, "torch.save(model)")], "`torch.save(model)` at train.py:90: once in about 500 steps"),
        ([], "checkpoints: once in about 500 steps"),
        ([part("checkpoint", 60, via="safetensors"), loader("transformers")], 'TrainingArguments(save_strategy="steps", save_steps=500), used at train.py:60'),
        ([part("checkpoint", 90), loader("transformers")], "train.py:90: once in about 500 steps"),
        ([loader("transformers")], "checkpoints: once in about 500 steps"),
    ],
)  # fmt: skip
def test_checkpoints_are_written_less_often_by_the_line_or_the_framework(parts, said):
    assert reported(*parts, fix=kit("checkpoint_every", 500)) == said


HELD_OUT = loader(line=50, text="held_out = DataLoader(test)", role="evaluation", num_workers=0)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([HELD_OUT], "evaluate 3 times less often, with the batches of `held_out = DataLoader(test)` at train.py:50"),
        ([part("evaluation", 55, "model.eval()")], "evaluate 3 times less often, begun by `model.eval()` at train.py:55"),
        ([], "evaluate 3 times less often"),
        ([loader("transformers", role="evaluation")], 'TrainingArguments(eval_strategy="steps", eval_steps=120), used at train.py:42'),
    ],
)  # fmt: skip
def test_evaluations_are_made_less_often(parts, said):
    """Five of them in 200 steps."""
    planted = {"evaluate": (40, 10.0), "checkpoint": (10, 1.0)}
    assert reported(*parts, fix=kit("evaluate_every", 3), planted=planted) == said


@pytest.mark.parametrize(
    ("parts", "usable", "said"),
    [
        ([HELD_OUT], 3.5, "DataLoader(num_workers=0) at train.py:50: set num_workers=3: the training process makes"),
        ([HELD_OUT], 2.0, "DataLoader(num_workers=0) at train.py:50: set num_workers=2: the training process makes"),
        ([HELD_OUT], 1.5, NOTHING),
        ([loader(role="evaluation", num_workers=2)], 3.5, NOTHING),
        ([loader(num_workers=0)], 3.5, NOTHING),
    ],
)
def test_evaluations_get_workers_where_they_have_none_and_cores_are_there(parts, usable, said):
    assert reported(*parts, kind="evaluation_stalls", planted={"usable": usable}).startswith(said)


def test_evaluations_get_no_workers_where_nobody_knows_the_cores():
    assert reported(HELD_OUT, kind="evaluation_stalls", planted={"system": False}) == NOTHING


# What is no setting


OWN = {"class": "Food", "file": "food.py", "line": 12}


@pytest.mark.parametrize(
    ("dataset", "said", "at"),
    [
        (OWN, "less work for each sample of Food, at food.py:12: ", "food.py:12"),
        ({**OWN, "file": None}, "less work for each sample of Food, at train.py:42: ", "train.py:42"),
        ({**OWN, "line": None}, "less work for each sample of Food, at train.py:42: ", "train.py:42"),
        ({**OWN, "file": "/v/site-packages/a.py"}, "less work for each sample of Food, at train.py:42: ", "train.py:42"),
        (None, "less work for each sample: ", "None"),
    ],
    ids=str,
)  # fmt: skip
def test_a_samples_work_is_that_of_its_dataset(dataset, said, at):
    [fix] = fixes(loader(dataset=dataset), kind="data_bound", lines=(line(14, 0.4, "data_wait"),))
    assert str(fix).startswith(said + "smaller images") and str(fix.at) == at
    assert "one file for many samples" in reported(loader(dataset=dataset), kind="storage_bound")


def test_without_workers_a_samples_work_is_the_training_threads_own():
    seen = dict(kind="data_bound", lines=(line(14, 0.4, "data_wait"),))
    none = {"settings": {"num_workers": 0}}
    assert reported(loader(dataset=OWN), planted=none, **seen).startswith("`work()` at train.py:14 takes 40 % of the")
    assert "sample of Food" in reported(loader(dataset=OWN), planted=none, kind="data_bound")


@pytest.mark.parametrize(
    ("parts", "said", "at"),
    [
        ([part("copy", 69, "x.to(device)"), loader()], "non_blocking=True in `x.to(device)` at train.py:69, from pinned memory: DataLoader(pin_memory=True) at train.py:42", "train.py:69"),
        ([loader()], ".to(device, non_blocking=True), from pinned memory: DataLoader(pin_memory=True) at train.py:42", "train.py:42"),
        ([], ".to(device, non_blocking=True), from pinned memory: DataLoader(pin_memory=True)", "None"),
    ],
)  # fmt: skip
def test_copies_come_from_pinned_memory(parts, said, at):
    [fix] = fixes(*parts, kind="host_to_device_bound")
    assert str(fix) == said and str(fix.at) == at


def test_a_line_is_named_where_it_takes_a_third_of_what_the_finding_does():
    """The finding takes three tenths of the time."""
    heavy, light = line(66, 0.11), line(67, 0.09)
    assert reported(kind="gpu_starved", lines=(heavy, light)).startswith("`work()` at train.py:66 takes 11 %")
    assert reported(kind="gpu_starved", lines=(light,)) == NOTHING
    assert "move it out of the step" in reported(kind="gpu_starved", lines=(heavy,))
    assert "check whether the slow steps wait there" in reported(kind="step_outliers", lines=(heavy,))
    assert "train.py:67" in reported(kind="slow_rank", lines=(heavy,), other_ranks={1: (line(67, 0.2),)})


@pytest.mark.parametrize(
    ("made", "workers", "advised"),
    [
        (loader(), 4, True),
        (loader(), 0, False),
        (loader(persistent_workers=True), 4, False),
        (loader(role="evaluation"), 4, False),
    ],
)
def test_workers_that_start_with_every_epoch_stay(made, workers, advised):
    planted = {"settings": {"num_workers": workers}}
    lines = (line(65, 0.2), line(66, 0.2, "between_passes"))
    first, *_ = fixes(made, kind="slow_epoch_starts", planted=planted, lines=lines)
    assert str(first).startswith("DataLoader(persistent_workers=False)" if advised else "`work()` at train.py:66")


@pytest.mark.parametrize(
    ("name", "advised"), [("DistributedDataParallel", True), ("DataParallel", False), (None, False)]
)
def test_gradients_are_compressed_by_a_hook_of_ddp(name, advised):
    parts = [part("data_parallel", 25, "model = DDP(model)", **{"class": name})] if name else []
    said = reported(*parts, kind="communication_bound", planted={"gpu": 60})
    assert said.startswith("register_comm_hook") == advised and ("at train.py:25: half the bytes" in said) == advised
    on_cores = fixes(*parts, kind="communication_bound")
    assert not any("register_comm_hook" in str(fix) for fix in on_cores), "memory that processes share is no network"


def test_a_number_that_is_read_at_every_step_is_read_less_often():
    waits = dataclasses.replace(line(88, 0.5), at=Address("train.py", 88, "total += loss.item()"))
    said = reported(kind="synchronising_calls", lines=(waits,))
    assert said.startswith("`total += loss.item()` at train.py:88 waits for the GPU at every step")
    assert reported(kind="synchronising_calls", lines=(line(88, 0.5),)) == NOTHING


@pytest.mark.parametrize(("scaler", "said"), [((), True), ((part("scaler", 3, enabled=False),), True), ((part("scaler", 3, enabled=True),), False)], ids=["none", "off", "on"])  # fmt: skip
def test_fp16_comes_with_a_scaler(scaler, said):
    assert ("torch.amp.GradScaler" in reported(*scaler, fix=kit("precision", "fp16", "fp32"))) == said
    assert "GradScaler" not in reported(*scaler, fix=kit("precision", "bf16", "fp32"))


@pytest.mark.parametrize(
    ("of", "framework"), [("checkpoint", None), ("model", "transformers"), ("step", "transformers")]
)
def test_a_library_that_only_saves_the_model_does_not_run_the_loop(of, framework):
    parts = (loader(), part(of, 7, "model.save_pretrained(folder)", "transformers"))
    assert Script(parts=parts).framework == framework
