"""The settings of train_segmentation.py. Standard library only, so that the launcher can check a config without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from training.settings import setting
from training.settings.distillation import LabelBankSettings
from training.settings.scripts import TeacherSettings


@dataclass(frozen=True, kw_only=True)
class PixelCacheSettings(LabelBankSettings):
    """What is kept of the answers for an image's pixels."""

    top_k: int = setting(1, at_least=0)
    """Largest logits kept of each place of the teacher's own grid, whose places are 4 pixels wide with most encoders. Those of all classes
    are kept at half the grid. 0: these alone, a 16th of all logits in fp16."""
    precision: Literal["int8", "int4"] = "int4"
    """Of how far a logit lies below a place's largest one: in 255 or 15 steps, which are finest where classes are about as likely."""


@dataclass(frozen=True, kw_only=True)
class SegmentationSettings(TeacherSettings):
    """Settings of train_segmentation.py. A teacher arrives as the channel `teacher`."""

    model: str
    """The encoder: a timm model that gives features at several scales, for example resnet50 or mobilenetv3_large_100."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model, for example {in_chans: 1, output_stride: 16}."""
    pretrained: bool = False
    """Start the encoder from timm's published weights; the training machine must reach the Hugging Face hub."""
    decoder_channels: int = setting(128, multiple_of=4)
    """Channels of the decoder, as in Panoptic FPN (https://arxiv.org/abs/1901.02446, section 3.1)."""
    classes: int = setting(at_least=2, at_most=256)
    """How many classes there are; a mask's pixels are 0 to classes - 1, or `ignore_index`."""
    class_names: list[str] | None = setting(None, on_resume="may change")
    """Names of the classes, from 0 on, for results, the model's card and pictures. None: their numbers."""
    class_colours: list[tuple[int, int, int]] | None = setting(None, on_resume="may change")
    """Red, green and blue of each class in pictures, 0 to 255. None: PASCAL VOC's, which go by the class's number."""
    ignore_index: int = setting(255, at_least=0, at_most=255)
    """Mask pixels of this value count neither in the loss nor in a metric; it may be a class's number."""
    image_size: tuple[int, int] = setting((512, 512), at_least=32, each="[height, width]")
    """Height and width in pixels to which whole images are scaled, whatever their aspect."""
    crop_size: tuple[int, int] | None = setting(None, at_least=32, each="[height, width]")
    """Height and width in pixels of the part that a training step sees. None: `image_size`."""
    min_scale: float = 1.0
    """Training images are scaled to `image_size` times a random factor, from this one ..."""
    max_scale: float = setting(1.0, at_most=10)
    """... to this one, before the crop; what the crop has beyond the image is ignored."""
    dice_weight: float = setting(0.0, at_least=0)
    """Weight of the soft Dice loss (https://arxiv.org/abs/1608.04117) beside the cross-entropy, whose weight is 1. It weighs classes
    alike, however few their pixels; use batches in which they occur."""
    overlays: int = setting(8, at_least=0, on_resume="may change")
    """Held-out images that the trained model is shown on in overlays.png, beside their masks, in class colours. 0: none."""
    temperature: float = setting(1.0, above=0)
    """Both models' logits are divided by it before the softmax."""
    hard_label_weight: float = 1.0
    """Weight of the loss of the masks. Below 1, or with a teacher_loss_weight, the model also learns the logits that a teacher of
    the same classes gives for each pixel (https://arxiv.org/abs/1903.04197, section 3.1): the model.tar.gz of such a run."""
    min_teacher_miou: float = setting(0.0, at_least=0, at_most=1, on_resume="may change")
    """Refuse to start with a teacher whose mean IoU on the validation images is lower, 0 to 1."""

    teacher_cache: PixelCacheSettings | None = None
    """Keep the teacher's logits and features, so that later epochs and runs need no teacher. None: it runs on every step."""

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
                f"a name for each of the {self.classes} classes, no two alike, or null",
            ),
            (
                "class_colours",
                self.class_colours is None
                or (len(colours) == self.classes and all(0 <= part <= 255 for colour in colours for part in colour)),
                f"[red, green, blue], each 0 to 255, for each of the {self.classes} classes, or null",
            ),
            ("min_scale", 0 < self.min_scale <= self.max_scale, "above 0 and at most max_scale"),
            ("teacher_cache", self.teacher_cache is None or self.has_teacher, "null where there is no teacher"),
        ]


@dataclass(frozen=True, kw_only=True)
class PixelLabellingSettings(SegmentationSettings):
    """Settings of label_pixels.py: those of the training runs that its answers are for."""

    @property
    def one_pass_per_step(self) -> bool:
        return True  # there are no gradients

    def conditions(self) -> list[tuple[str, bool, str]]:
        return super().conditions() + [
            ("teacher_cache", self.teacher_cache is not None, "views, and what is kept: it names the label bank"),
            ("probe_seconds", self.probe_seconds == 0, "0: nothing is trained"),
        ]
