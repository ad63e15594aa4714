"""A first config for what is in a folder: a script, images, or both. It reads the disk and writes nothing."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config.descriptions import Described, script_settings
from launcher.config.expressions import NotPlain
from launcher.config.file_trees import image_suffixes, walk
from launcher.config.issues import Issue, mistake
from launcher.config.job import SCRIPT_PATH, portable_script
from launcher.config.yaml_edit import written
from launcher.planner.source_package import ALWAYS_EXCLUDED, SCHEMA_FILE
from launcher.show.text import listed

HELD_OUT = ("validation", "val", "valid")
"""Names of a folder of held-out images, the kit's own first."""

SHOWN = 8
"""Maximum scripts or folders that are named as choices."""

DEFAULT_SCRIPT = "train_classifier.py"

AWS_KEYS = ("role", "region", "output", "image", "compute.instance_type")
"""What a job on SageMaker needs beyond one on this machine."""


@dataclass(frozen=True)
class Images:
    """A folder of images."""

    channels: Mapping[str, Path]
    """Channel -> folder: `train` and `validation`, or `train` alone."""
    classes: int
    """Subfolders of the training images; 0: there are no class folders."""
    count: int
    """Training images; 0: in tar shards, which are not opened."""


@dataclass(frozen=True)
class Script:
    """A user's training script."""

    file: Path
    settings: tuple[Described, ...]
    """What a job may give it; none if they cannot be read, as `unread` says."""
    unread: str
    channels: tuple[str, ...]
    """The data channels that it names, as SM_CHANNEL_<NAME>."""
    distributed: bool


def find_script(folder: Path) -> Path | None:
    """The only training script in a folder. None: there is none, or several."""
    found = _scripts(folder)
    return found[0] if len(found) == 1 else None


def _scripts(folder: Path) -> list[Path]:
    """The Python files of a folder that train or take arguments."""
    return [
        file
        for file in sorted(folder.glob("*.py"))
        if file.is_file()
        and not file.name.startswith(".")
        and re.search(r"argparse|SM_CHANNEL_|\bimport torch\b|\bfrom torch\b", file.read_text(errors="replace"))
    ]


def find_images(folder: Path) -> Path | None:
    """The only folder of images nearby: the folder itself, one in it, or one in its `data`. None: there is none, or several."""
    if _channels(folder):
        return folder
    found = _image_folders(folder)
    return found[0] if len(found) == 1 else None


def _image_folders(folder: Path) -> list[Path]:
    """The folders of images in a folder and in its `data`."""
    near = [*_subfolders(folder), *_subfolders(folder / "data")]
    return [one for one in near if _channels(one) or _classes(one)]


def nothing_found(folder: Path) -> Issue:
    """The issue for a folder with neither exactly one script nor exactly one folder of images, with what is there instead."""
    scripts, images = _scripts(folder), _image_folders(folder)
    found = "neither one training script nor one folder of images is here"
    several = [
        f"{len(several)} {what} are: {', '.join(map(str, several[:SHOWN]))}{' …' if len(several) > SHOWN else ''}"
        for what, several in (("training scripts", scripts), ("folders of images", images))
        if several
    ]
    fix = "name one with --script or --images; or make images to begin with: launcher prepare digits data/digits"
    if several:
        split = [one for one in images if _channels(one)]  # the kit's classifier needs held-out images
        option = ["--script", str(scripts[0])] if scripts else ["--images", str((split or images)[0])]
        found, fix = f"{found}; {'; '.join(several)}", f"choose one: {shlex.join(['launcher', 'init', *option])}"
        if not scripts and not split:
            fix = f"none has held-out images; choose one: {_commands_that_split(images[0])}"
    return Issue(key=str(folder), found=found, fix=fix)


def look_at_images(folder: Path) -> Images:
    """What a folder of images holds.

    Raises:
        UserError: there is no such folder, or it holds no images.
    """
    if not folder.is_dir():
        found = "a file, not a folder" if folder.exists() else "no such folder"
        raise mistake("--images", f"{folder}: {found}", "name a folder with images")
    channels = _channels(folder)
    if any({"images", "masks"} <= {one.name for one in _subfolders(place)} for place in (folder, *channels.values())):
        raise mistake(
            "--images",
            f"{folder}: images with masks, for segmentation",
            "start from the built-in config: launcher explain cutouts_segmentation",
        )
    train = channels.get("train", folder)
    classes, count = len(_classes(train)), _count(train)
    if not count and not channels:
        raise mistake(
            "--images",
            f"{folder}: no images",
            "name a folder with images",
            valid=f"files that end with {' '.join(image_suffixes())}",
        )
    return Images(channels or {"train": folder}, classes, count)


def look_at_script(file: Path) -> Script:
    """What a script takes, read from its text; nothing in it runs.

    Raises:
        UserError: there is no such file, it is not Python, or has a name that no job may give.
    """
    if not file.is_file():
        raise mistake("--script", f"{file}: no such file", "name a Python file")
    if file.suffix != ".py":
        raise mistake("--script", str(file), "name a Python file", valid="a file that ends with .py")
    if not re.fullmatch(SCRIPT_PATH, file.name):
        raise mistake(
            "--script",
            str(file),
            f"rename it: {shlex.join(['mv', str(file), str(_free_name(file))])}",
            valid="a file name of letters, digits and . _ + -",
        )
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        settings, unread = tuple(script_settings(file.parent, file.name)), ""
    except NotPlain as error:
        settings, unread = (), str(error)
    except (SyntaxError, ValueError) as error:
        raise mistake("--script", f"{file}: {error}", "correct the script") from None
    channels = dict.fromkeys(name.lower() for name in re.findall(r"SM_CHANNEL_([A-Z0-9_]+)", text))
    return Script(file, settings, unread, tuple(channels), "init_process_group" in text)


def _free_name(file: Path) -> Path:
    """A name that a script may have instead: close to its own, and not taken."""
    near = file.with_name(portable_script(file.name))
    numbered = (near.with_stem(f"{near.stem}_{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([near], numbered) if not path.exists())


def config_text(
    file: Path, script: Script | None, images: Images | None, image: str, defaults: Collection[str] = ()
) -> str:
    """A commented config for this machine, with what SageMaker needs as comments.

    Args:
        file: where it will be; paths in it are relative to the current folder, from which jobs are started.
        script: None: the kit's classifier.
        images: None: the script gets no input.
        image: SageMaker's, as a config has it.
        defaults: keys that the user's or the project's defaults give.

    Raises:
        UserError: the kit's classifier cannot learn from these images.
    """
    quoted = shlex.quote(str(file))
    name = re.sub(r"[^a-zA-Z0-9]+", "-", file.stem)[:42].strip("-") or "my-job"
    if script is not None:
        about = f"{script.file.name} as a job"
    else:
        assert images is not None, "a config needs a script or images"
        _refuse_for_the_classifier(images)
        about = _of_images(images)
    lines = [
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# {about}. Written by `launcher init`; `launcher explain {quoted}` says what each key means.",
        f"# Plan:   launcher plan {quoted}            (what would happen; nothing does)",
        f"# Run:    launcher run {quoted}",
        f"name: {written(name)}",
        *(_own_script(script) if script else [f"script: {DEFAULT_SCRIPT}", "distribution: torchrun"]),
        "compute:",
        "  max_hours: 1                      # a run is stopped then",
        "  # instance_type: ml.g5.xlarge     # SageMaker's hosts",
        *_inputs(script, images),
        *(_own_settings(script) if script else _classifier_settings(images)),
        *_for_sagemaker(name, image, defaults),
    ]
    return "\n".join(lines) + "\n"


def _for_sagemaker(name: str, image: str, defaults: Collection[str]) -> list[str]:
    """What a job on SageMaker needs and this one lacks, as comments."""
    examples = {
        "role": "arn:aws:iam::123456789012:role/SageMakerTraining",
        "region": "us-west-2",
        "output": f"s3://amzn-s3-demo-bucket/{name}",
        "image": image,
    }
    given = [key for key in examples if key in defaults]
    lines = [f"# SageMaker's {listed(given)}: from your defaults, see `launcher defaults`"] if given else []
    if lacking := {key: example for key, example in examples.items() if key not in given}:
        lines.append("# For SageMaker, also instance_type above; launcher plan --on aws checks them:")
        lines += [f"# {key}: {example}" for key, example in lacking.items()]
    return lines


def _refuse_for_the_classifier(images: Images) -> None:
    folder = images.channels["train"]
    if not images.classes and images.count:
        raise mistake(
            "--images",
            f"{folder}: images in no class folders, from which {DEFAULT_SCRIPT} cannot tell the classes",
            "sort them into a subfolder for each class, or name a script of your own with --script",
        )
    if "validation" not in images.channels:
        raise mistake(
            "--images",
            f"{folder}: class folders without held-out images",
            _commands_that_split(folder),
            valid="a folder with train/ and validation/",
        )


def _commands_that_split(folder: Path) -> str:
    """How to start from class folders without held-out images."""
    target = _split_folder(folder)
    prepare = shlex.join(["launcher", "prepare", str(folder), target])
    return f"{prepare}, which holds out a quarter; then {shlex.join(['launcher', 'init', '--images', target])}"


def _split_folder(folder: Path) -> str:
    """Where `launcher prepare` may write a folder's images: in `data`, or beside the folder if that is or contains `data`."""
    whole = folder.resolve()
    inside, name = Path("data"), f"{whole.name}-split"
    if whole not in (inside.resolve(), *inside.resolve().parents):
        return str(inside / name)
    return os.path.relpath(os.path.join(os.path.abspath(folder), os.pardir, name))


def _of_images(images: Images) -> str:
    root = images.channels["train"].parent
    return f"A classifier for the images in {'the current folder' if root == Path('.') else root}"


def _own_script(script: Script) -> list[str]:
    return [
        f"script: {written(script.file.name)}",
        f"source: {written(str(script.file.parent))}        # this folder travels, but for its inputs; .launcherignore leaves files out",
        f"distribution: {'torchrun' if script.distributed else 'none'}        # none: one process; torchrun: one a GPU",
    ]


def _inputs(script: Script | None, images: Images | None) -> list[str]:
    """The section `inputs`: every channel that the script names, with the images there are for it."""
    folders = dict(images.channels) if images else {}
    wanted = list(script.channels) if script and script.channels else list(folders)
    held_out = folders.get("validation")
    found = {name: held_out if name in (*HELD_OUT, "test") and held_out else folders.get("train") for name in wanted}
    if not wanted:
        return ["# inputs:", "#   train: {folder: data/train}     # the script finds it in SM_CHANNEL_TRAIN"]
    if not folders:
        return [
            "# inputs:",
            *(f"#   {name}: {{folder: data/{name}}}     # SM_CHANNEL_{name.upper()}" for name in wanted),
        ]
    about = f"     # {images.count} images" if images and images.count else ""
    about += f" in {images.classes} classes" if about and images and images.classes else ""
    lines = [f"  {written(name)}: {{folder: {written(str(place))}}}" for name, place in found.items()]
    lines[0] += about
    code = script.file.parent.resolve() if script else None
    lines += [
        f"  {written(name)}: {{folder: {written(str(place))}}}     # the script does not read SM_CHANNEL_{name.upper()}; "
        "listed so that the folder is not packed with its code"
        for name, place in folders.items()
        if place not in found.values() and code is not None and place.resolve().is_relative_to(code)
    ]
    return ["inputs:", *lines]


def _classifier_settings(images: Images | None) -> list[str]:
    """A few settings, with no more images per step than there are."""
    batch = 64
    while images is not None and images.count and batch > max(1, images.count):
        batch //= 2
    return [
        "hyperparameters:",
        "  model: resnet18                   # a timm model",
        "  image_size: 224                   # pixels, of what the model sees",
        "  epochs: 10",
        f"  global_batch_size: {batch}             # images a step, over all processes",
        "  learning_rate: 1e-3",
        "smoke:                              # what --smoke changes: a few small steps, to see that everything is in place",
        "  hyperparameters: {max_steps: 3, image_size: 64}",
    ]


def _own_settings(script: Script) -> list[str]:
    """The script's settings as comments: its defaults, and what it requires."""
    if script.unread:
        return [f"# hyperparameters: the settings of {script.file.name} could not be read: {script.unread}"]
    lines = [f"# hyperparameters:     # {script.file.name}'s own, with its defaults"]
    for one in script.settings:
        if "." not in one.name and not one.default_expression:
            value = "" if one.required else json.dumps(one.default)
            about = "; ".join(filter(None, [one.takes, one.sentence, "required: yours to fill in" * one.required]))
            lines.append(f"#   {written(one.name)}: {value}".rstrip() + f"     # {about}")
    return lines if len(lines) > 1 else []


def _channels(folder: Path) -> dict[str, Path]:
    """The training and held-out images of a folder that is split; empty for one that is not."""
    held_out = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None)
    train = folder / "train"
    return {"train": train, "validation": held_out} if train.is_dir() and held_out is not None else {}


def _subfolders(folder: Path) -> list[Path]:
    """The subfolders that can be read."""
    if not folder.is_dir():
        return []
    return sorted(
        one
        for one in folder.iterdir()
        if one.is_dir() and not one.name.startswith(".") and os.access(one, os.R_OK | os.X_OK)
    )


def _classes(folder: Path) -> list[Path]:
    """The subfolders with images directly in them."""
    endings = image_suffixes()
    return [one for one in _subfolders(folder) if any(file.name.lower().endswith(endings) for file in one.iterdir())]


def _count(folder: Path) -> int:
    return sum(1 for _ in _images(folder))


def _images(folder: Path) -> Iterator[str]:
    """The images below a folder, including linked folders."""
    endings = image_suffixes()
    for _, folders, files in walk(folder):
        folders[:] = [name for name in folders if name not in ALWAYS_EXCLUDED and not name.startswith(".")]
        yield from (file for file in files if file.lower().endswith(endings) and not file.startswith("."))
