"""What each of the kit's scripts can be told. Standard library only, so that the launcher can check a config without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from training.settings import require


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What every training script can be told."""

    epochs: int = 10
    """Passes over the training images."""
    max_steps: int | None = None
    """Stop after this many optimizer steps; the learning-rate schedule ends there too. None: as `epochs` says."""
    global_batch_size: int = 64
    """Images an optimizer step, over all processes. It must divide by their number."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW, after the warm-up."""
    weight_decay: float = 0.05
    """AdamW's decoupled weight decay; biases and normalisation weights get none."""
    warmup_fraction: float = 0.1
    """Share of the steps in which the learning rate rises linearly from 0."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this L2 norm. None: never."""
    horizontal_flip: bool = False
    """Mirror half of the training images."""
    seed: int = 0
    """Seed of the initial weights, the order of images and their augmentation."""
    num_workers: int = 0
    """Worker processes that decode images, per training process. 0: the training process itself."""
    log_every: int = 10
    """Steps between two metric lines."""
    evaluate_every: int = 1
    """Epochs between two evaluations on the validation images; the last step is always followed by one."""

    def __post_init__(self) -> None:
        require(*self.conditions())

    def channels(self) -> list[str]:
        """The data channels that the script reads; the launcher refuses a job that lacks one."""
        return ["train", "validation"]

    def conditions(self) -> list[tuple[str, bool, str]]:
        """What must hold, as (setting, holds, valid)."""
        return [
            ("epochs", self.epochs >= 1, "at least 1"),
            ("max_steps", self.max_steps is None or self.max_steps >= 1, "at least 1, or null"),
            ("global_batch_size", self.global_batch_size >= 1, "at least 1"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("warmup_fraction", 0 <= self.warmup_fraction <= 1, "from 0 to 1"),
            ("max_grad_norm", self.max_grad_norm is None or self.max_grad_norm > 0, "above 0, or null"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 4294967295"),
            ("num_workers", self.num_workers >= 0, "0 or more"),
            ("log_every", self.log_every >= 1, "at least 1"),
            ("evaluate_every", self.evaluate_every >= 1, "at least 1"),
        ]


@dataclass(frozen=True, kw_only=True)
class LabelledImageSettings(TrainingSettings):
    """What every script can be told that learns one class an image."""

    label_smoothing: float = 0.0
    """Weight of the uniform distribution in the label loss (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567)."""
    images_per_class: int | None = None
    """Train on no more than the first so many images of each class, by file name. None: on all."""
    image_size: int = 224
    """Height and width in pixels of what the models see."""
    min_crop_area: float = 1.0
    """Smallest share of the image that a random crop keeps; 1: no random crop."""
    max_shift_pixels: int = 0
    """Shift training images by up to this many pixels of `image_size` in each direction."""
    max_rotation_degrees: float = 0.0
    """Rotate training images by up to this many degrees either way."""

    def conditions(self) -> list[tuple[str, bool, str]]:
        return super().conditions() + [
            ("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1"),
            ("images_per_class", self.images_per_class is None or self.images_per_class >= 1, "at least 1, or null"),
            ("image_size", self.image_size >= 8, "at least 8"),
            ("min_crop_area", 0 < self.min_crop_area <= 1, "above 0 and at most 1"),
            ("max_shift_pixels", 0 <= self.max_shift_pixels < self.image_size, "from 0 to below image_size"),
            ("max_rotation_degrees", 0 <= self.max_rotation_degrees <= 180, "from 0 to 180"),
        ]


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings(LabelledImageSettings):
    """Settings of train_classifier.py."""

    model: str
    """A timm model's name, for example vit_small_patch16_224."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model, for example {img_size: 32, patch_size: 4, depth: 6}."""
    pretrained: bool = False
    """Start from timm's published weights; the training machine must reach the Hugging Face hub."""


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(LabelledImageSettings):
    """Settings of train_kd.py. The teacher arrives as the channel `teacher`."""

    student: str
    """The student: a timm model's name."""
    student_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model."""
    pretrained: bool = False
    """Start the student from timm's published weights; the training machine must reach the Hugging Face hub."""
    teacher: str | None = None
    """The teacher's timm name. None: as the teacher's model.json says, which this kit's scripts write beside the weights."""
    teacher_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model; only beside `teacher`."""
    temperature: float = 4.0
    """Both models' logits are divided by it before the softmax (Hinton et al. 2015, https://arxiv.org/abs/1503.02531)."""
    hard_label_weight: float = 0.5
    """Weight of the label loss; the teacher's part gets the rest. 1: labels alone, and the teacher is neither loaded nor run."""

    def channels(self) -> list[str]:
        return super().channels() + (["teacher"] if self.hard_label_weight < 1 else [])

    def conditions(self) -> list[tuple[str, bool, str]]:
        return super().conditions() + [
            ("temperature", self.temperature > 0, "above 0"),
            ("hard_label_weight", 0 <= self.hard_label_weight <= 1, "from 0 to 1"),
            (
                "teacher_options",
                not self.teacher_options or self.teacher is not None,
                "empty where `teacher` names no model",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class SegmentationSettings(TrainingSettings):
    """Settings of train_segmentation.py."""

    model: str
    """The encoder: a timm model that gives features at several scales, for example resnet50 or mobilenetv3_large_100."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model, for example {in_chans: 1, output_stride: 16}."""
    pretrained: bool = False
    """Start the encoder from timm's published weights; the training machine must reach the Hugging Face hub."""
    decoder_channels: int = 128
    """Channels of the decoder, as in Panoptic FPN (https://arxiv.org/abs/1901.02446, section 3.1)."""
    classes: int
    """How many classes there are; a mask's pixels are 0 to classes - 1, or `ignore_index`."""
    ignore_index: int = 255
    """Mask pixels of this value count neither in the loss nor in a metric; it may be a class's number."""
    image_size: tuple[int, int] = (512, 512)
    """Height and width in pixels to which whole images are scaled, whatever their aspect."""
    crop_size: tuple[int, int] | None = None
    """Height and width in pixels of the part that a training step sees. None: `image_size`."""
    min_scale: float = 1.0
    """Training images are scaled to `image_size` times a random factor, from this one ..."""
    max_scale: float = 1.0
    """... to this one, before the crop; what the crop has beyond the image is ignored."""

    def conditions(self) -> list[tuple[str, bool, str]]:
        return super().conditions() + [
            ("decoder_channels", self.decoder_channels >= 4 and self.decoder_channels % 4 == 0, "a multiple of 4"),
            ("classes", self.classes in range(2, 257), "from 2 to 256"),
            ("ignore_index", 0 <= self.ignore_index <= 255, "from 0 to 255"),
            ("image_size", min(self.image_size) >= 32, "[height, width], each at least 32"),
            (
                "crop_size",
                self.crop_size is None or min(self.crop_size) >= 32,
                "[height, width], each at least 32, or null",
            ),
            ("min_scale", 0 < self.min_scale <= self.max_scale, "above 0 and at most max_scale"),
            ("max_scale", self.max_scale <= 10, "at most 10"),
        ]
