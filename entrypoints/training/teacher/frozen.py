"""The frozen teacher, one model or several, from a channel or published weights. Training cannot change it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from training.measure.arithmetic import Counted
from training.models import segmenter, timm_models
from training.models.compiled import StaticBatch
from training.models.export import hash_weights, read_description
from training.models.features import Level, WithFeatures
from training.models.files import member_folders, read_weights, weights_file
from training.models.fp8 import to_fp8
from training.models.precision import FORMATS, unsupported
from training.runtime import accelerator

Precision = Literal["fp32", "bf16", "fp16", "fp8"]

Answer = TypeVar("Answer")

LOCAL, HUB = "local-dir:", "hf-hub:"
"""timm's prefixes for a model in a folder, and for one on the Hugging Face Hub that timm has no name for."""


class FrozenModel:
    """One frozen model: its logits, and features on request, in its own normalisation, resolution and number format.

    Not an nn.Module, so no optimizer, average, DDP or checkpoint of the student reaches it.
    """

    def __init__(
        self,
        model: timm_models.Normalized,
        name: str,
        options: Mapping[str, Any],
        *,
        precision: Precision = "fp32",
        compile: bool = False,
        cuda_graphs: bool = False,
        features: Level | None = None,
    ):
        """
        Args:
            model: changed in place, and not to be used elsewhere.
            name, options: the arguments of timm.create_model.
            cuda_graphs: run the compiled model as CUDA graphs.
            features: which to return beside the logits. None: none.

        Raises:
            ValueError: as WithFeatures; fp8, and the model or torch does not support it.
        """
        self.name, self.options, self.precision = name, dict(options), precision
        self.parameters = timm_models.parameter_count(model)
        memory_format = torch.channels_last if timm_models.convolutional(model) else torch.contiguous_format
        model.to(FORMATS[precision]).to(memory_format=memory_format)
        if precision == "fp8":
            _require(precision, model.mean.device)
            to_fp8(model.model)
        self.model = model.eval().requires_grad_(False)
        timm_models.choose_attention(model, FORMATS[precision], model.mean.device)
        self._parts = [*model.modules()]
        self._called: torch.nn.Module = model if features is None else WithFeatures(model, features).eval()
        self._compiled = StaticBatch(self._called, name, "compile_teacher", graphs=cuda_graphs) if compile else None

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images uint8 (batch, channels, height, width) -> logits float32 (batch, classes[, height, width])."""
        return self.with_features(images)[0]

    def with_features(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same logits, and the requested features, float32 (batch, width) or (batch, rows, columns, width)."""
        if any(module.training for module in self._parts):  # someone called train(): dropout and BatchNorm stay off
            self.model.eval()
        # no_grad: the student's backward pass cannot save inference_mode's tensors
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            output = (self._compiled or self._called)(images)
            logits, features = output if isinstance(output, tuple) else (output, None)
            return logits.float(), None if features is None else features.float()

    def digest(self) -> str:
        """SHA-256 of everything but the images that the logits depend on, whichever file and device hold the weights."""
        described = {
            "name": self.name,
            "options": self.options,
            "image size": self.model.image_size,
            "mean": self.model.mean.flatten().tolist(),
            "std": self.model.std.flatten().tolist(),
        }
        total = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        hash_weights(total, self.model.model.state_dict())
        return total.hexdigest()

    def disable_compiling(self) -> None:
        """Run eagerly from now on."""
        self._compiled = None


class Teacher:
    """The logits of a frozen model, or the mean of several models' logits.

    The mean of logits is the geometric mean of the models' predictive distributions, at every temperature: one of the two
    ensembles in Hinton, Vinyals and Dean 2015 (https://arxiv.org/abs/1503.02531, section 1).
    """

    def __init__(self, members: Sequence[FrozenModel]):
        self.members = tuple(members)
        self.name = " + ".join(member.name for member in members)
        self._side: accelerator.SideStream | None = None

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images uint8 (batch, channels, height, width) -> logits float32 (batch, classes[, rows, columns]), without a gradient."""
        first, *others = (member(images) for member in self.members)
        return torch.stack([first, *others]).mean(0) if others else first

    def with_features(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits and features of the only model, which was loaded with features, from one forward pass."""
        [member] = self.members
        logits, features = member.with_features(images)
        assert features is not None, "whoever asks for features has loaded the teacher with them"
        return logits, features

    def on_its_stream(self, asked: Callable[[torch.Tensor], Answer], images: torch.Tensor) -> Answer:
        """What `asked`, which is this teacher or its `with_features`, says of images that were copied on the stream COPIES. A GPU
        computes it on the stream TEACHER, while the student's step before still runs."""
        if not accelerator.is_gpu(images.device):
            return asked(images)
        self._side = self._side or accelerator.SideStream(images.device, accelerator.TEACHER)
        return self._side.run(lambda: asked(images), after=accelerator.COPIES)

    def to(self, device: torch.device) -> Teacher:
        """Move the weights to a device, in place; a no-op if they are there.

        Raises:
            ValueError: the GPU does not support fp8, which the models compute in.
        """
        for member in self.members:
            if member.precision == "fp8":
                _require(member.precision, device)
            if member.model.mean.device != device:  # `to` walks through all modules and parameters
                member.model.to(device)
                timm_models.choose_attention(member.model, FORMATS[member.precision], device)
        return self

    @property
    def parameters(self) -> int:
        """Number of parameters of all its models."""
        return sum(member.parameters for member in self.members)

    @property
    def counted(self) -> list[Counted]:
        """Its models, as measure/arithmetic.py counts them."""
        return [(member._called, member.precision) for member in self.members]

    @property
    def memory_bytes(self) -> int:
        """Bytes of its weights on their device."""
        held = [value for member in self.members for value in [*member.model.parameters(), *member.model.buffers()]]
        return sum(value.numel() * value.element_size() for value in held)

    def eager(self) -> Teacher:
        """The same models, uncompiled: for a trial of batch sizes, whose shapes a compiled model would keep."""
        members = [*map(copy.copy, self.members)]
        for member in members:
            member.disable_compiling()
        return Teacher(members)

    def digest(self) -> str:
        """SHA-256 of everything but the images that the logits depend on; the order of models does not count."""
        return hashlib.sha256("".join(sorted(member.digest() for member in self.members)).encode()).hexdigest()


def _require(precision: Precision, device: torch.device) -> None:
    if (problem := unsupported(precision, device)) is not None:
        raise ValueError(f"teacher_precision {precision}: {problem}")


def load(
    channel: Path | None,
    classes: Sequence[str],
    *,
    channels: int,
    image_size: int | Sequence[int],
    name: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    precision: Precision = "fp32",
    compile: bool = False,
    cuda_graphs: bool = False,
    pixels: bool = False,
    upsampled: bool = True,
    features: Level | None = None,
) -> Teacher:
    """Load the teacher from a channel or from published weights, on the CPU.

    Args:
        channel: a folder with one model: a run's model.tar.gz, its content, or one weights file (.safetensors, .pt, .pth or .bin:
            a state dict, or a checkpoint with one under state_dict, model or model_ema); or with several, each an archive or a
            subfolder. None: `name` says where the weights are.
        classes: the student's classes, in the order of its logits.
        channels, image_size: of the images it will see: the side of a square, which it rescales to its own size; with `pixels`,
            the height and width that whole images are scaled to.
        name, options: the timm model that the weights belong to. None: the description beside the weights names it. A list: one per
            model of the channel, in the order of names. Without a channel: timm models with published weights,
            hf-hub:OWNER/NAME, or local-dir:FOLDER.
        precision: of the weights and the arithmetic.
        compile: pass the models through torch.compile at the first batch; one that fails runs eagerly, with a warning.
        cuda_graphs: run compiled models as CUDA graphs.
        pixels: the teacher predicts a class for every pixel, as train_segmentation.py's models do.
        upsampled: with `pixels`, the logits are as large as the images; else they stay on the models' own grid.
        features: which to return beside the logits. None: none.

    Raises:
        ValueError: everything that is wrong with any model: no weights, several, damaged ones; no model name; weights that do not
            fit it; other classes or channels than the student's; a segmenter for images of another size; a segmenter where a
            classifier belongs, or the other way round; features of several models; fp8, and a model or torch does not support it.
    """
    members, problems = [], []
    # the teacher's random initialisation must not change the student's
    with tempfile.TemporaryDirectory() as unpacked, torch.random.fork_rng(devices=[]):
        sources = _sources(channel, [name] if name is None or isinstance(name, str) else name, Path(unpacked))
        for source in sources:
            try:
                if pixels:
                    found = _read_segmenter(source, classes, channels, image_size, upsampled)
                else:
                    found = _read(source, options or {}, classes, channels, image_size)
                members.append(
                    FrozenModel(
                        *found, precision=precision, compile=compile, cuda_graphs=cuda_graphs, features=features
                    )
                )
            except ValueError as error:
                problems.append(f"{source.label}: {error}" if len(sources) > 1 else str(error))
        if features is not None and len(sources) > 1:
            labels = ", ".join(source.label for source in sources)
            problems.append(
                f"features of {len(sources)} teachers ({labels}) have no mean: give one, or set features to null"
            )
    if problems:
        raise ValueError("\n".join(problems))
    return Teacher(members)


class _Source(NamedTuple):
    """Where one model comes from."""

    label: str
    """Names the model in messages if there are several."""
    folder: Path | None
    """None: published weights."""
    name: str | None
    """Its timm name. None: the description in the folder names it."""


def _sources(channel: Path | None, names: Sequence[str | None], unpacked: Path) -> list[_Source]:
    if channel is not None:
        places = member_folders(channel, unpacked)
        names = [*names] * len(places) if len(names) == 1 else names
        if len(names) != len(places):
            raise ValueError(
                f"the hyperparameter teacher names {len(names)} models ({', '.join(map(str, names))}), the channel teacher holds "
                f"{len(places)} ({', '.join(places)}): give one name for each, in this order"
            )
        return [_Source(label, folder, name) for (label, folder), name in zip(places.items(), names)]
    sources = []
    for number, name in enumerate(names):
        if name is None:
            raise ValueError(
                "there is no teacher: give the channel teacher, or the hyperparameter teacher a model's name"
            )
        if not name.startswith(LOCAL):
            sources.append(_Source(name, None, name))
        elif not (folder := Path(name[len(LOCAL) :])).is_dir():
            raise ValueError(f"teacher {name}: {folder} is not a folder on the training machine")
        else:
            places = member_folders(folder, unpacked / str(number))
            sources += [_Source(f"{name}/{label}", place, None) for label, place in places.items()]
    return sources


_Found = tuple[timm_models.Normalized, str, Mapping[str, Any]]
"""A model, and the name and options with which timm made it."""


def _read(
    source: _Source, options: Mapping[str, Any], classes: Sequence[str], channels: int, image_size: int | Sequence[int]
) -> _Found:
    """One of the teacher's models.

    Raises:
        ValueError: as `load`.
    """
    if source.folder is None:
        assert source.name is not None, "_sources asks for one"
        return _published(source.name, options, classes, channels)
    file, description, name = weights_file(source.folder), read_description(source.folder), source.name
    if description is not None and description.decoder is not None:
        raise ValueError(
            f"{file.name} gives every pixel a class: take a classifier, or let train_segmentation.py learn from it"
        )
    if description is not None and (name is None or (name == description.name and not options)):
        name, options = description.name, description.options
    if name is None:
        raise ValueError(
            f"{file.name} has no timm config.json beside it: set the hyperparameter teacher to the name of its model"
        )
    known = None if description is None else description.classes
    _require_fit(known, classes, options.get("in_chans", 3), channels)
    with _fits(file, f"{name} with {dict(options)} and {len(classes)} classes"):
        inner = timm_models.create_for(read_weights(file), name, options, num_classes=len(classes))
    if description is None:
        model = timm_models.normalize(inner, inner.pretrained_cfg, options)
    else:
        model = timm_models.Normalized(inner, description.mean, description.std)
    described = None if description is None else description.image_size
    model.image_size = _side(described or _fixed_size(inner.pretrained_cfg, options) or image_size)
    return model, name, options


def _read_segmenter(
    source: _Source, classes: Sequence[str], channels: int, image_size: int | Sequence[int], upsampled: bool
) -> _Found:
    """One of the teacher's segmentation models.

    Its features and decoder are made for the image size that it was trained at, and images scaled to that size would not match
    the student's crops. So both train on images of one size.

    Raises:
        ValueError: as `load`.
    """
    assert source.folder is not None, "timm publishes no segmenters"
    file, description = weights_file(source.folder), read_description(source.folder)
    if description is None or description.decoder is None:
        raise ValueError(
            f"{file.name} is not a segmenter from train_segmentation.py with a config.json that names its encoder and decoder: give the "
            "model.tar.gz of such a run as the channel teacher"
        )
    name, options = description.name, description.options
    numbers = [str(number) for number in range(len(classes))]
    known = [*(description.classes or ())]
    unnamed = len(known) == len(classes) and numbers in (known, [*classes])
    _require_fit(None if unnamed else known, classes, options.get("in_chans", 3), channels)
    learned = description.image_size
    height, width = (learned, learned) if isinstance(learned, int) else learned
    wanted = [image_size, image_size] if isinstance(image_size, int) else [*image_size]
    if [height, width] != wanted:
        raise ValueError(
            f"the teacher learned from images scaled to [{height}, {width}], the student's are scaled to {wanted}: give both "
            "the same image_size"
        )
    model = segmenter.build(
        name, options, len(classes), decoder_channels=description.decoder["channels"], upsamples=upsampled
    )
    with _fits(file, f"{name} with {dict(options)}, {description.decoder} and {len(classes)} classes"):
        model.model.load_state_dict(read_weights(file))
    return timm_models.Normalized(model.model, description.mean, description.std), name, options


@contextlib.contextmanager
def _fits(file: Path, what: str) -> Iterator[None]:
    """Name the file and the model if the weights do not fit.

    Raises:
        ValueError: the file's weights are not those of the model.
    """
    try:
        yield
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(f"{file.name} does not fit {what}: {first}") from error


def _published(name: str, options: Mapping[str, Any], classes: Sequence[str], channels: int) -> _Found:
    """A model with its published weights, head and image size."""
    try:
        if name.startswith(HUB):
            model = timm_models.made_by_timm(name, pretrained=True, **options)
        else:
            model = timm_models.create(name, options, pretrained=True)
    except (OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the published weights of {name} cannot be loaded ({first}): give them as the channel teacher, or let the training "
            "machine reach the Hugging Face hub"
        ) from error
    published = model.pretrained_cfg
    if model.num_classes != len(classes):
        raise ValueError(
            f"{name} was published for {model.num_classes} classes, the training images have {len(classes)}: train it on them "
            "first (train_classifier.py with pretrained: true), and give the result as the channel teacher"
        )
    _require_fit(published.get("label_names"), classes, options.get("in_chans", 3), channels)
    size = _fixed_size(published, options) or published["input_size"][1:]
    return timm_models.normalize(model, published, options, _side(size)), name, options


def _require_fit(known: Sequence[str] | None, classes: Sequence[str], made_for: int, channels: int) -> None:
    problems = []
    if known and [*known] != [*classes]:
        problems.append(
            f"the teacher knows the classes {_some(known)}, the training images have {_some(classes)}: train it on the same classes"
        )
    if made_for != channels:
        problems.append(
            f"the teacher was made for channels {made_for}, the student sees {channels}: give both the same in_chans"
        )
    if problems:
        raise ValueError("\n".join(problems))


def _fixed_size(published: Mapping[str, Any], options: Mapping[str, Any]) -> int | Sequence[int] | None:
    """A model's only image size, such as that of a ViT's position embeddings; None: any."""
    return options.get("img_size") or (published["input_size"][1:] if published.get("fixed_input_size") else None)


def _side(image_size: int | Sequence[int]) -> int:
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if height != width:
        raise ValueError(
            f"the teacher sees images of {height} × {width} pixels, the student squares: give it an image size of its own"
        )
    return height


def _some(names: Sequence[str]) -> str:
    return ", ".join(list(names)[:4]) + (f" … ({len(names)})" if len(names) > 4 else "")
