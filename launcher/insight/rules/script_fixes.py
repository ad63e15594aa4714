"""A finding's fixes in terms of a user script: an argument on the line that made the object, or the framework's name for the setting."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from launcher.insight import windows
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding, Fix, percent
from launcher.insight.gains import of_other_fixes
from launcher.insight.rules.feeding import larger_parts
from launcher.insight.rules.processes import in_one_memory
from launcher.insight.script import Address, Part, SampledLine, Script
from launcher.show.text import listed

ARGUMENTS: dict[str | None, dict[str, str]] = {
    "transformers": {
        "num_workers": "TrainingArguments(dataloader_num_workers={})",
        "batch_size": "TrainingArguments(per_device_train_batch_size={})",
        "pin_memory": "TrainingArguments(dataloader_pin_memory={})",
        "persistent_workers": "TrainingArguments(dataloader_persistent_workers={})",
        "bf16": "TrainingArguments(bf16=True)",
        "fp16": "TrainingArguments(fp16=True)",
        "tf32": "TrainingArguments(tf32=True)",
        "compile": "TrainingArguments(torch_compile={})",
        "checkpoint_every": 'TrainingArguments(save_strategy="steps", save_steps={})',
        "evaluate_every": 'TrainingArguments(eval_strategy="steps", eval_steps={})',
    },
    "lightning": {
        "bf16": 'Trainer(precision="bf16-mixed")',
        "fp16": 'Trainer(precision="16-mixed")',
        "checkpoint_every": "ModelCheckpoint(every_n_train_steps={})",
    },
    "accelerate": {
        "bf16": 'Accelerator(mixed_precision="bf16")',
        "fp16": 'Accelerator(mixed_precision="fp16")',
    },
}
"""Each framework's name for a setting. https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments,
https://lightning.ai/docs/pytorch/stable/common/trainer.html, https://huggingface.co/docs/accelerate/package_reference/accelerator"""
ARGUMENTS["pytorch_lightning"] = ARGUMENTS["lightning"]

HYPERPARAMETERS = {
    "num_workers": re.compile(r"(num_|n_|dataloader_num_|data_)?workers"),
    "batch_size": re.compile(r"(per_device_)?(train_)?batch(_size)?"),
}
"""Names under which a script most likely takes an argument of a DataLoader."""

TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def for_script(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with fixes that an observed script can apply; its own lines come before settings if they say more."""
    script = evidence.script
    assert script is not None
    first, more = (table.get(finding.kind, _nothing) for table in (FIRST, MORE))
    rewritten = (_in_its_terms(fix, evidence, script) for fix in finding.fixes)
    fixes = (
        *first(finding, evidence, script),
        *(fix for fix in rewritten if fix is not None),
        *more(finding, evidence, script),
    )
    if finding.gain is not None and finding.fixes and _has_it(finding.fixes[0]):
        finding = replace(finding, gain=of_other_fixes(finding))
    return replace(
        finding, fixes=fixes or (_note("see in which lines of the script the training thread spends its time"),)
    )


def _has_it(fix: Fix) -> bool:
    """Whether the run already has a fix's value."""
    return fix.setting is not None and fix.now is not None and fix.value == fix.now


def _in_its_terms(fix: Fix, evidence: Evidence, script: Script) -> Fix | None:
    """A rule's fix in the script's terms; None: the script cannot apply it, or already has it."""
    if fix.setting is None:
        return fix if fix.scope == "any" or (fix.scope == "job" and script.by_launcher) else None
    kind, _, name = fix.setting.partition(".")
    if kind == "hyperparameters":
        return SETTINGS[name](fix, evidence, script) if name in SETTINGS and not _has_it(fix) else None
    if kind != "environment" or script.by_launcher:
        return fix
    now = f", now {fix.now}" if fix.now is not None else ""
    return replace(fix, change=f"{name}={fix.value} in the environment of the command{now}")


# The rules' settings


def _workers(fix: Fix, evidence: Evidence, script: Script) -> Fix | None:
    value = fix.value
    if value == "auto":
        if evidence.cores_each is None:
            return None  # a guess may be fewer than there are workers
        value = max(1, math.floor(evidence.cores_each))
    loaders = script.loaders("training")
    if len(loaders) > 1:  # from outside, a number is set for each of them
        made = listed([str(part.at) for part in loaders])
        return replace(
            fix,
            setting=None,
            value=f"{value} data workers in all (now {evidence.workers}), of the DataLoaders at {made}",
        )
    return _argument(script, "num_workers", value, now=evidence.workers, why=fix.why)


def _batch(fix: Fix, evidence: Evidence, script: Script) -> Fix:
    now, whole = evidence.images_per_micro_batch, evidence.settings.get("global_batch_size")
    if "auto" in fix.also.values() and isinstance(whole, int):
        factor = fix.value // whole
        value = f"sum the gradients of {factor} batches before each step: GPU memory cannot hold {factor} times the images at once"
        return replace(fix, setting=None, value=value, also={})
    if not isinstance(whole, int) or now is None or len(script.loaders("training")) > 1:
        return replace(fix, setting=None, value="a larger batch")
    return _argument(script, "batch_size", max(1, now * fix.value // whole), now=now, why=fix.why)


def _parts(fix: Fix, evidence: Evidence, script: Script) -> Fix:
    now, factor = evidence.images_per_micro_batch or 1, larger_parts(evidence)
    why = f"and accumulate {factor} times fewer batches a step; the training stays the same"
    return _argument(script, "batch_size", now * factor, now=now, why=why)


def _precision(fix: Fix, evidence: Evidence, script: Script) -> Fix:
    model, argument = script.trained_model, ARGUMENTS.get(script.framework, {}).get(str(fix.value))
    if argument is not None:
        change, at = f"{argument}{_used(model)}", _at(model)
    elif fix.value == "tf32":
        change, at = "torch.set_float32_matmul_precision('high')", _at(script.part("optimizer"))
        change += f" before {_code(at)}" if at else ""
    else:
        where, at = _forward(script)
        change = (
            f"torch.autocast('{evidence.facts.get('device') or 'cuda'}', dtype=torch.{TYPES[fix.value]}) around {where}"
        )
        scaler = script.part("scaler")
        if fix.value == "fp16" and (scaler is None or scaler.values.get("enabled") is False):
            change += ", with torch.amp.GradScaler around backward and step: small gradients are 0 in fp16"
    return replace(fix, setting="precision", change=change, at=at)


def _forward(script: Script) -> tuple[str, Address | None]:
    """The forward pass in words, and its line; the backward pass's line if the record does not say which line calls the model."""
    model, step, backward = script.trained_model, script.part("step"), script.part("backward")
    if model is not None and (step is None or step.at != model.at):
        return f"{_code(model.at)} and the loss", model.at
    return "the forward pass and the loss" + (f", before {_code(backward.at)}" if backward else ""), _at(backward)


def _compile(fix: Fix, evidence: Evidence, script: Script) -> Fix:
    made = script.part("compile") if fix.value is False else script.trained_model
    argument = ARGUMENTS.get(script.framework, {}).get("compile")
    if argument is not None:
        change = f"{argument.format(fix.value)}{_used(made)}"
    elif fix.value:
        change = "model = torch.compile(model)" + (f" before {_code(made.at)}" if made else "")
    else:
        change = "no torch.compile" + (f" at {made.at}" if made else "")
    return replace(fix, setting="compile", change=change, at=_at(made))


def _checkpoints(fix: Fix, evidence: Evidence, script: Script) -> Fix:
    made = script.part("checkpoint")
    by_framework = made is not None and made.via is not None  # perhaps by a library below it
    argument = ARGUMENTS.get(script.framework if by_framework else None, {}).get("checkpoint_every")
    if argument is not None:
        change = f"{argument.format(fix.value)}{_used(made)}"
    else:
        change = f"{_code(made.at) if made else 'checkpoints'}: once in about {fix.value} steps"
    return replace(fix, setting="checkpoint_every", change=change, at=_at(made))


def _evaluations(fix: Fix, evidence: Evidence, script: Script) -> Fix:
    made, times = script.loader("evaluation") or script.part("evaluation"), fix.value
    argument = ARGUMENTS.get(script.framework, {}).get("evaluate_every")
    if argument is not None:
        seen = {stall.step for stall in evidence.measurements.stalls if stall.kind == "evaluate"}
        every = round(windows.steps_done(evidence.ranks[0]) / max(len(seen), 1) * times)
        change, value = f"{argument.format(every)}{_used(made)}", every
    else:
        of = "with the batches of" if made and made.of == "loader" else "begun by"
        with_it = f", {of} {_code(made.at)}" if made else ""
        change, value = f"evaluate {times} times less often{with_it}", times
    return replace(fix, setting="evaluate_every", value=value, change=change, at=_at(made))


SETTINGS: dict[str, Callable[[Fix, Evidence, Script], Fix | None]] = {
    "num_workers": _workers,
    "global_batch_size": _batch,
    "batch_size_per_device": _parts,
    "precision": _precision,
    "compile": _compile,
    "checkpoint_every": _checkpoints,
    "evaluate_every": _evaluations,
}
"""The kit's settings that a user script has too; a fix of any other is left out."""


def _argument(script: Script, name: str, value: Any, *, now: Any, why: str, role: str = "training") -> Fix:
    """A change of a DataLoader's argument: on its line, or through the framework that makes it."""
    loader = script.loader(role)
    argument = ARGUMENTS.get(loader.via if loader else None, {}).get(name)
    if loader is None:
        change = f"DataLoader({name}={value})"
    elif argument is not None:
        change = f"{argument.format(value)}{_used(loader)}"
    elif loader.via is not None:
        change = f"the DataLoader that {loader.via} makes at {loader.at}: set {name}={value} (now {now})"
    else:
        change = f"DataLoader({name}={now}) at {loader.at}: set {name}={value}"
    fed_by = _argument_of_script(script, name, now, loader)
    change += f", in the {'config' if script.by_launcher else 'command'} {fed_by}={value}" if fed_by else ""
    key = fed_by if script.by_launcher else None
    return Fix(setting=name, value=value, now=now, why=why, change=change, at=_at(loader), key=key)


def _argument_of_script(script: Script, name: str, now: Any, loader: Part | None) -> str | None:
    """The script's argument that sets a DataLoader's: the only one with a likely name, if the line names it and the values match."""
    if loader is None or name not in HYPERPARAMETERS:
        return None
    likely = [one for one in script.arguments if HYPERPARAMETERS[name].fullmatch(one.replace("-", "_"))]
    if len(likely) != 1 or str(script.arguments[likely[0]]) != str(now):
        return None
    named = re.search(rf"=\s*[\w.]*\b{likely[0].replace('-', '_')}\b(?!\s*=)", loader.at.text)
    return script.key(likely[0]) if named else None


# What is no setting


def _samples(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    """The code that makes a sample: the line where the training thread is, or the dataset of the workers."""
    advice = (
        "one file for many samples, or a copy on a nearby disk"
        if finding.kind == "storage_bound"
        else "smaller images, cheaper transforms, or their results stored once before training"
    )
    line, loader = script.busiest("data_wait"), script.loader("training")
    if not evidence.workers and line is not None:
        return [_note(f"{_code(line.at)} takes {percent(line.share)} of the training thread's time: {advice}", line.at)]
    dataset = loader.values.get("dataset") if loader else None
    if not dataset:
        return [_note(f"less work for each sample: {advice}")]
    at = Address(dataset["file"], dataset["line"]) if dataset.get("file") and dataset.get("line") else None
    at = at if at and at.is_own else _at(loader)
    return [_note(f"less work for each sample of {dataset['class']}, at {at}: {advice}", at)]


def _copies(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    copy, loader = script.part("copy"), script.loader("training")
    pinned = f"DataLoader(pin_memory=True){f' at {loader.at}' if loader else ''}"
    line = f"non_blocking=True in {_code(copy.at)}" if copy else ".to(device, non_blocking=True)"
    made = copy or loader
    return [_note(f"{line}, from pinned memory: {pinned}", _at(made))]


def _waits(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    line = script.waiting_line
    if line is None:
        return []
    return [
        _note(f"{_code(line.at)} waits for the GPU at every step: read the number every 100 steps, or later", line.at)
    ]


def _loop(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    """The loop's own lines that take a good part of the finding's time."""
    what = "check whether the slow steps wait there" if finding.kind == "step_outliers" else "move it out of the step"
    return _heavy(finding, script.loop_lines, what)


def _heavy(finding: Finding, lines: Sequence[SampledLine], what: str) -> list[Fix]:
    heavy = [line for line in lines if line.share >= HEAVY * (finding.share or 0.0)]
    return [
        _note(f"{_code(line.at)} takes {percent(line.share)} of the training thread's time: {what}", line.at)
        for line in heavy[:2]
    ]


def _slow_rank(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    assert finding.rank is not None
    return _loop(finding, evidence, script.of_rank(finding.rank))


def _epochs(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    own = [line for line in script.lines if line.phase == "between_passes" and line.at.is_own]
    there = _heavy(finding, own, "it runs between epochs; do it less often, or in another process")
    loader = script.loader("training")
    if not evidence.workers or loader is None or loader.values.get("persistent_workers"):
        return there
    kept = _argument(script, "persistent_workers", True, now=False, why="the workers stay from epoch to epoch")
    return [kept, *there]


def _evaluation_loader(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    loader, cores = script.loader("evaluation"), math.floor(evidence.cores_each or 1)
    if loader is None or loader.values.get("num_workers") != 0 or cores < 2:
        return []
    # advice, not a change that `tune` may make: from outside, it sets an argument of every loader
    of_this_loader = _argument(script, "num_workers", cores, now=0, why="", role="evaluation")
    why = "the training process makes the batches itself, between its steps"
    return [replace(_note(of_this_loader.change, of_this_loader.at), why=why)]


def _exchange(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    made = script.part("data_parallel")
    if made is None or made.values.get("class") != "DistributedDataParallel" or in_one_memory(evidence):
        return []
    hook = "register_comm_hook(None, default_hooks.bf16_compress_hook)"
    return [replace(_note(f"{hook} on the model of {_code(made.at)}", made.at), why="half the bytes")]


def _start(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    return [_note("check what the script does before its first step: downloads, lists of many files, compilation")]


def _nothing(finding: Finding, evidence: Evidence, script: Script) -> list[Fix]:
    return []


HEAVY = 1 / 3
"""Part of a finding's share from which a line explains much of it."""

More = Callable[[Finding, Evidence, Script], list[Fix]]

FIRST: dict[str, More] = {
    "data_bound": _samples,
    "storage_bound": _samples,
    "host_to_device_bound": _copies,
    "synchronising_calls": _waits,
    "main_thread_bound": _loop,
    "gpu_starved": _loop,
    "step_outliers": _loop,
    "slow_rank": _slow_rank,
    "slow_epoch_starts": _epochs,
}
"""Fixes that come before the rules' own, by the kind of finding."""

MORE: dict[str, More] = {
    "too_few_workers": _samples,
    "evaluation_stalls": _evaluation_loader,
    "communication_bound": _exchange,
    "slow_start": _start,
}
"""Fixes that come after them."""


# Words


def _note(text: str, at: Address | None = None) -> Fix:
    return Fix(setting=None, value=text, at=at)


def _code(at: Address) -> str:
    """A line with its place."""
    return f"`{at.text}` at {at}" if at.text else str(at)


def _at(part: Part | None) -> Address | None:
    return None if part is None else part.at


def _used(part: Part | None) -> str:
    return f", used at {part.at}" if part else ""
