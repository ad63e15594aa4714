"""Whether a teacher on this machine fits its student, by the config.json beside its weights; no weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.config.issues import Issue
from launcher.config.job import Job
from launcher.config.sections import Input
from launcher.config.students import LABELS, LABELS_PIXELS, TRAINS, students
from launcher.record import archives
from launcher.record.records import RunFolder

CHANNEL, DESCRIPTION = "teacher", "config.json"

PIXELS = "train_segmentation.py"
"""The script whose teachers give every pixel a class."""

OF_PIXELS = (PIXELS, LABELS_PIXELS)

SCRIPTS = (TRAINS, LABELS, *OF_PIXELS)

MAX_BYTES = 64 * 2**20
"""Bytes unpacked from an archive in search of its config.json, which takes half a second; and more than any config.json has."""

WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
"""As in training.models.files."""

error = partial(Issue, key=f"inputs.{CHANNEL}")
not_checked = partial(error, level="not checked", fix="nothing to do: the run itself checks before its first step")


class _NotSeen(Exception):
    """The description was not found; says why."""


def check(job: Job, places: Mapping[str, str]) -> Iterator[Issue]:
    """Issues with the channel `teacher` of one of this kit's scripts: its kind, classes, channels and image size.

    Args:
        places: channel -> its folder or file, for those on this machine.
    """
    given, settings = job.inputs.get(CHANNEL), job.hyperparameters
    each = [{**settings, **own} for own in students(job).values()] or [settings]
    if job.source is not None or job.script not in SCRIPTS or given is None:
        return
    if all(_labels_alone(job.script, own) for own in each):
        return
    if job.script not in OF_PIXELS and _mapping(settings.get("teacher_cache")).get("complete") is True:
        yield error(
            level="warning",
            found=f"given, and {job.script} does not read it with teacher_cache.complete",
            fix="remove it, unless it is for launcher label, which reads it",
        )
        return
    if given.source in ("s3", "fsx", "efs"):
        yield not_checked(found="whether the teacher fits its student: it is not on this machine")
    if CHANNEL not in places or settings.get("teacher_pretrained") is True:
        return
    try:
        if isinstance(settings.get("teacher"), list):
            raise _NotSeen("it is an ensemble")
        described = _description(given, Path(places[CHANNEL]))
    except _NotSeen as why:
        yield not_checked(found=f"whether the teacher fits its student: {why}")
    except (OSError, ValueError, archives.ArchiveError) as damage:
        yield error(found=f"{places[CHANNEL]} is damaged ({str(damage)[:80]})", fix="copy it again, or train it again")
    else:
        yield from _about(job, described, places)


def _labels_alone(script: str, settings: Mapping[str, Any]) -> bool:
    """Whether a model with these settings needs no teacher."""
    labels = settings.get("hard_label_weight", 1 if script in OF_PIXELS else 0.5)
    return labels == 1 and not settings.get("teacher_loss_weight") and not settings.get("features")


def _about(job: Job, described: Mapping[str, Any], places: Mapping[str, str]) -> Iterator[Issue]:
    """Conflicts between a description and a job, as `training.teacher.frozen` would find them."""
    pixels, settings = job.script in OF_PIXELS, job.hyperparameters
    if pixels == ("decoder" not in described):
        kind, other = ("an image", "train_kd.py") if pixels else ("every pixel", PIXELS)
        yield error(
            found=f"the teacher gives {kind} a class, and {job.script} cannot learn from that", fix=f"use {other}"
        )
        return
    encoder = _mapping(described.get("encoder", described))
    preprocessing = _mapping(described.get("preprocessing", described.get("pretrained_cfg", described)))
    size = preprocessing.get("input_size")
    taught = size[0] if isinstance(size, list) and len(size) == 3 else None
    made_with = _mapping(encoder.get("model_args"))
    named = None if pixels else settings.get("teacher")
    if named not in (None, encoder.get("architecture")) or settings.get("teacher_options"):
        made_with, taught = _mapping(settings.get("teacher_options")), 3
    taught = made_with.get("in_chans", taught)
    options = "model_options" if pixels else "student_options"
    first = next(iter(students(job).values()), {})  # all see images with the same channels
    seen = _mapping(first.get(options, settings.get(options))).get("in_chans", 3)
    if isinstance(taught, int) and isinstance(seen, int) and taught != seen:
        fix = f"write {options}: {{in_chans: {taught}}}, or take another teacher"
        yield error(found=f"the teacher was made for {taught} channels, the student sees {seen}", fix=fix)
    known, wanted = described.get("label_names", preprocessing.get("label_names")), _classes(job, places)
    same = isinstance(known, list) and wanted is not None and len(known) == len(wanted)
    if pixels and same and _unnamed(len(known)) in (known, wanted):
        known = wanted  # by number alone, as a segmenter's are if `class_names` is not set
    if isinstance(known, list) and known and wanted is not None and known != wanted:
        found = f"the teacher knows the classes {_some(known)}, the training images have {_some(wanted)}"
        yield error(found=found, fix="train it on the same classes, or take another teacher")
    height, width = size[1:] if isinstance(size, list) and len(size) == 3 else (None, None)
    if pixels and height is not None and _image_size(settings) not in (None, [height, width]):
        found = f"the teacher learned from images scaled to [{height}, {width}], the student's are scaled to {_image_size(settings)}"
        yield error(found=found, fix=f"write image_size: [{height}, {width}]")
    if not pixels and height != width:
        yield error(
            found=f"the teacher sees images of {height} × {width} pixels, the student squares", fix="take another"
        )


def _description(given: Input, place: Path) -> Mapping[str, Any]:
    """The config.json of the channel's only teacher. Raises _NotSeen, or what reading a damaged file raises."""
    if given.run is not None:
        unpacked = RunFolder(place.parent).unpacked_model / DESCRIPTION
        if unpacked.is_file():
            return _parsed(unpacked.read_bytes())
    if place.is_dir():
        entries = [entry for entry in place.iterdir() if not entry.name.startswith(".")]
        packed = [entry for entry in entries if entry.name.endswith(".tar.gz")]
        alone = not any(entry.is_dir() for entry in entries) or any(entry.suffix in WEIGHTS for entry in entries)
        if len(packed) > 1 or not (packed or alone):
            raise _NotSeen("it holds several archives or folders")
        place = packed[0] if packed else place / DESCRIPTION
    if place.name.endswith(".tar.gz"):
        content = archives.read_member(place, DESCRIPTION, MAX_BYTES)
        if content is None:
            raise _NotSeen(f"its archive holds no {DESCRIPTION} in its first {MAX_BYTES // 2**20} MiB")
        return _parsed(content)
    if place.name != DESCRIPTION or not place.is_file():
        raise _NotSeen(f"it has no {DESCRIPTION}")
    return _parsed(place.read_bytes())


def _parsed(content: bytes) -> Mapping[str, Any]:
    described = json.loads(content)
    if not isinstance(described, dict) or not isinstance(described.get("encoder", described), dict):
        raise ValueError(f"{DESCRIPTION} is no object")
    if not isinstance(_mapping(described.get("encoder", described)).get("architecture"), str):
        raise _NotSeen(f"its {DESCRIPTION} is not one of timm's")
    return described


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _classes(job: Job, places: Mapping[str, str]) -> list[str] | None:
    """The classes that a job trains on, in the order of its logits; None: not known here."""
    settings = job.hyperparameters
    if job.script in OF_PIXELS:
        names, count = settings.get("class_names"), settings.get("classes")
        return names or ([str(index) for index in range(count)] if isinstance(count, int) and count <= 256 else None)
    labelled = next((Path(places[name]) for name in ("train", "validation") if name in places), None)
    if labelled is None or not labelled.is_dir() or any(labelled.glob("*.tar")):
        return None
    return sorted(entry.name for entry in labelled.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _image_size(settings: Mapping[str, Any]) -> list[Any] | None:
    """A segmenter's [height, width]; None if it is given otherwise."""
    given = settings.get("image_size", [512, 512])
    return given if isinstance(given, list) and all(isinstance(side, int) for side in given) else None


def _unnamed(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _some(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:4])) + (f" … ({len(names)})" if len(names) > 4 else "")
