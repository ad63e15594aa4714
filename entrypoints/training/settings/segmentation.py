"""The settings of train_segmentation.py. Standard library only, so that the launcher can check a config without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from training.settings import setting
from training.settings.distillation import LabelBankSettings
from training.settings.scripts import IN_CHANS, TeacherSettings


@dataclass(frozen=True, kw_only=True)
class PixelCacheSettings(LabelBankSettings):
    """How the answers for an image's pixels are stored."""

    top_k: int = setting(1, at_least=0)
    """Largest logits kept at each position of the teacher's own grid, whose positions are 4 pixels wide with most encoders. All classes'
    logits are kept at half the grid. 0: only those, 1/16 the size of all logits in fp16."""
    precision: Literal["int8", "int4"] = "int4"
    """Number format of a logit's distance below its position's largest one: 255 or 15 steps, finest where classes are about equally
    likely."""


@dataclass(frozen=True, kw_only=True)
class SegmentationSettings(TeacherSettings):
    """Settings of train_segmentation.py. A teacher comes from the channel `teacher`."""

    model: str
    """The encoder: a timm model that gives features at several scales, for example resnet50 or mobilenetv3_large_100."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model, for example {in_chans: 1, output_stride: 16}."""
    pretrained: bool = False
    """Start the encoder from timm's published weights; the training machine must reach the Hugging Face hub."""
    decoder_channels: int = setting(128, multiple_of=4)
    """Channels of the decoder, as in Panoptic FPN (https://arxiv.org/abs/1901.02446, section 3.1)."""
    classes: int = setting(at_least=2, at_most=256)
    """Number of classes. A mask's pixels are 0 to classes - 1, or `ignore_index`."""
    class_names: list[str] | None = setting(None, on_resume="may change")
    """Names of the classes, from 0 on, for results, the model card and pictures. None: their numbers."""
    class_colours: list[tuple[int, int, int]] | None = setting(None, on_resume="may change")
    """Red, green and blue of each class in pictures, 0 to 255. None: PASCAL VOC's colours, by class number."""
    ignore_index: int = setting(255, at_least=0, at_most=255)
    """The loss and the metrics ignore mask pixels of this value. It may be a class number."""
    image_size: tuple[int, int] = setting((512, 512), at_least=32, each="[height, width]")
    """Height and width in pixels to which whole images are scaled, whatever their aspect ratio."""
    crop_size: tuple[int, int] | None = setting(None, at_least=32, each="[height, width]")
    """Height and width in pixels of the part that a training step sees. None: `image_size`."""
    min_scale: float = 1.0
    """Training images are scaled to `image_size` times a random factor of at least this."""
    max_scale: float = setting(1.0, at_most=10)
    """Largest such factor. The crop comes after; its parts beyond the image are ignored."""
    dice_weight: float = setting(0.0, at_least=0)
    """Weight of the soft Dice loss (https://arxiv.org/abs/1608.04117) beside the cross-entropy, whose weight is 1. Dice weighs classes
    equally, however few their pixels; use batches in which they occur."""
    overlays: int = setting(8, at_least=0, on_resume="may change")
    """Held-out images in overlays.png, each with its mask and the trained model's prediction in class colours. 0: none."""
    temperature: float = setting(1.0, above=0)
    """Both models' logits are divided by it before the softmax."""
    hard_label_weight: float = 1.0
    """Weight of the mask loss. Below 1, or with a teacher_loss_weight, the model also learns a teacher's logits for each pixel
    (https://arxiv.org/abs/1903.04197, section 3.1). The teacher is the model.tar.gz of a run of this script with the same classes."""
    min_teacher_miou: float = setting(0.0, at_least=0, at_most=1, on_resume="may change")
    """Refuse to start if the teacher's mean IoU on the validation images is below this, 0 to 1."""

    teacher_cache: PixelCacheSettings | None = None
    """Keep the teacher's logits and features, so that later epochs and runs need no teacher. None: the teacher runs in every step."""

    @property
    def names(self) -> list[str]:
        """Of the classes, in the order of the logits."""
        return [*self.class_names] if self.class_names else [str(number) for number in range(self.classes)]

    def channels(self) -> list[str]:
        cache = [self.teacher_cache.channel] if self.teacher_cache and self.teacher_cache.channel else []
        return super().channels() + (["teacher"] if self.has_teacher else []) + cache

    def conditions(self) -> list[tuple[str, bool, str]]:
        names, colours = self.class_names or (), self.class_colours or ()
        return super().conditions() + [
            (
                "class_names",
                self.class_names is None
                or (len(names) == self.classes == len({*names}) and all(name.strip() for name in names)),
                f"a distinct name for each of the {self.classes} classes, or null",
            ),
            (
                "class_colours",
                self.class_colours is None
                or (len(colours) == self.classes and all(0 <= part <= 255 for colour in colours for part in colour)),
                f"[red, green, blue], each 0 to 255, for each of the {self.classes} classes, or null",
            ),
            ("model_options", self.model_options.get("in_chans", 3) in (1, 3), IN_CHANS),
            ("min_scale", 0 < self.min_scale <= self.max_scale, "above 0 and at most max_scale"),
            (
                "teacher_cache",
                self.teacher_cache is None or (self.has_teacher and not self.teacher_stream),
                "null if there is no teacher, or with teacher_stream",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class PixelLabellingSettings(SegmentationSettings):
    """Settings of label_pixels.py: those of the training runs that its answers are for."""

    @property
    def one_pass_per_step(self) -> bool:
        return True  # there are no gradients

    def conditions(self) -> list[tuple[str, bool, str]]:
        return super().conditions() + [
            ("teacher_cache", self.teacher_cache is not None, "a mapping with views: it names the label bank"),
            ("probe_seconds", self.probe_seconds == 0, "0: nothing is trained"),
        ]
