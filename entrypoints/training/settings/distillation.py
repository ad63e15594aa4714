"""The settings of distillation: of train_kd.py, and of label_images.py. Standard library only, as all settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from training.settings import limits, require, setting
from training.settings.entries import variants
from training.settings.scripts import IN_CHANS, LabelledImageSettings, TeacherSettings
from training.settings.students import MAX_STUDENTS, OF_A_STUDENT

AS_COMPLETE = "with teacher_cache.complete: the label bank replaces the teacher"
"""Why a setting of the teacher has no meaning."""


@dataclass(frozen=True, kw_only=True)
class LabelBankSettings:
    """Where the teacher's answers are kept, and for how many views."""

    views: int = setting(at_least=1)
    """Reproducible variants of each image. Epoch e draws view (e - 1) mod `views` + 1; with views_per_decode N, N epochs draw N views. With
    as many views as epochs, training is as if the teacher ran."""
    where: str | None = setting(None, on_resume="may change")
    """A folder, or channel:NAME for the folder of an input, which the run reads and fills (FSx) or only reads (S3). None: teacher_cache
    among the checkpoints, which SageMaker copies to S3."""
    feature_precision: Literal["fp16", "int8", "int4"] = "int8"
    """Number format of the teacher's features, which are kept if `features` are learned. int8 and int4 use 255 or 15 steps between a
    vector's largest and smallest number. int4 is for tokens, which take a thousand times the space of logits; it changes the loss by
    several percent."""

    def __post_init__(self) -> None:
        require(*limits(self), *self.conditions())

    def conditions(self) -> list[tuple[str, bool, str]]:
        """Of values that each are valid: the setting, whether it holds, and what is valid."""
        return [("where", self.where is None or self.where not in ("", "channel:"), "a folder, channel:NAME, or null")]

    @property
    def channel(self) -> str | None:
        """The input that holds the bank, where it is one."""
        return self.where.removeprefix("channel:") if self.where and self.where.startswith("channel:") else None


@dataclass(frozen=True, kw_only=True)
class TeacherCacheSettings(LabelBankSettings):
    """How the answer for an image is stored."""

    top_k: int | None = setting(10, at_least=1)
    """Largest logits kept per image, with the log-sum-exp of the rest. Training spreads the rest evenly, which is coarse at a high
    temperature and with many classes. None: all logits."""
    precision: Literal["fp32", "fp16", "int8", "int4"] = "fp16"
    """Number format of the kept logits. int8 and int4 use 255 or 15 steps from an image's largest logit to the smallest one kept."""
    complete: bool = False
    """The bank has every answer and replaces the teacher: no teacher is loaded, and the channel `teacher` is not read. A run that lacks an
    answer ends before its first step."""

    def conditions(self) -> list[tuple[str, bool, str]]:
        named = self.where is not None or not self.complete
        valid = "a folder or channel:NAME with complete: it names the complete bank"
        return [*super().conditions(), ("where", named, valid)]


@dataclass(frozen=True, kw_only=True)
class TeacherServersSettings:
    """How servers send the teacher's logits."""

    top_k: int | None = setting(10, at_least=1)
    """Largest logits sent per image, with the log-sum-exp of the rest, as in teacher_cache. None: all logits."""
    precision: Literal["fp32", "fp16", "int8", "int4"] = "fp16"
    """Number format of these logits, as in teacher_cache."""

    def __post_init__(self) -> None:
        require(*limits(self))


@dataclass(frozen=True, kw_only=True)
class UnlabelledSettings:
    """Which unlabelled images to train on."""

    alone: bool = False
    """Do without the channel `train`: the student learns from the teacher's answers alone. The channel `validation` names the classes."""
    per_labelled: float | None = setting(None, above=0)
    """Unlabelled images that an epoch draws for each labelled one. The next epoch draws others, until each has had its turn. With
    teacher_cache the draws repeat with its views, so too few views leave images out. None: all of them, in every epoch."""

    def __post_init__(self) -> None:
        together = self.per_labelled is None or not self.alone
        require(*limits(self), ("per_labelled", together, "null with alone: there are no labelled images"))


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(TeacherSettings, LabelledImageSettings):
    """Settings of train_kd.py. The teacher comes from the channel `teacher`, from published weights, or as a complete label bank."""

    student: str = ""
    """The student: a timm model's name. Required, here or for each of `students`."""
    students: dict[str, dict[str, Any]] | None = setting(None, overrides=OF_A_STUDENT)
    """Several students, by name, that learn side by side from the same images and answers of the teacher. Each may set its own student,
    student_options, pretrained, seed (for its initial weights and dropout; the job's seed orders the images), optimizer, learning_rate,
    weight_decay, warmup_fraction, max_grad_norm, ema_decay, channels_last, label_smoothing, and everything about its loss. None: one
    student."""
    student_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model."""
    pretrained: bool | Literal["channel"] = False
    """Start the student from timm's published weights; the training machine must reach the Hugging Face hub. channel: start from the
    weights in the channel `weights`, which come from a run, the hub or `launcher weights`; a head for other classes starts anew."""
    teacher: str | list[str] | None = None
    """The teacher's timm name, or several for an ensemble. None: taken from the description beside the weights, which this kit's scripts
    write."""
    teacher_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model; only with `teacher`."""
    teacher_pretrained: bool = False
    """Use timm's published weights for `teacher` instead of the channel's; the training machine must reach the Hugging Face hub."""
    view_size: int | None = setting(None, at_least=8)
    """Height and width in pixels of the views, if the teacher needs more pixels than the student. Each model scales a view to its own size.
    None: image_size."""
    min_teacher_accuracy: float = setting(0.0, at_least=0, at_most=1, on_resume="may change")
    """Refuse to start if the teacher's accuracy on the validation images is below this, 0 to 1."""
    teacher_cache: TeacherCacheSettings | None = setting(None, optional_for_entries=True)
    """Keep the teacher's logits and features, so that later epochs and runs need no teacher. None: the teacher runs in every step."""
    teacher_servers: TeacherServersSettings | None = None
    """With worker_type remote: the hosts that make the training images also run the teacher, on their GPUs if they have any, and send its
    logits with the images. None: the training processes run it."""
    unlabelled: UnlabelledSettings | None = None
    """Also train on the channel `unlabelled`: images in any folder tree or in shards, with the teacher's answers as labels. {}: on all of
    them. None: on labelled images alone."""
    method: Literal["kl", "hard", "dkd", "dist"] = "kl"
    """The teacher's part of the loss: temperature KL (https://arxiv.org/abs/1503.02531), hard labels of the teacher
    (https://arxiv.org/abs/2012.12877), decoupled KD (https://arxiv.org/abs/2203.08679), DIST (https://arxiv.org/abs/2205.10536)."""
    standardize_logits: bool = False
    """Z-score both models' logits per image before the teacher's part of the loss (https://arxiv.org/abs/2403.01427)."""
    dkd_alpha: float = setting(1.0, at_least=0)
    """Weight of DKD's part for the target class."""
    dkd_beta: float = setting(8.0, at_least=0)
    """Weight of DKD's part for the other classes."""
    dist_beta: float = setting(1.0, at_least=0)
    """Weight of DIST's relation between an image's classes."""
    dist_gamma: float = setting(1.0, at_least=0)
    """Weight of DIST's relation between a class's images."""

    @property
    def image_channels(self) -> int:
        """Of the images that the students see: 1 for grey, 3 for colour."""
        return int(next(iter(variants(self).values())).student_options.get("in_chans", 3))

    @property
    def has_complete_bank(self) -> bool:
        """Whether a label bank stands in for the teacher."""
        return self.teacher_cache is not None and self.teacher_cache.complete

    @property
    def one_pass_per_step(self) -> bool:
        return super().one_pass_per_step and self.students is None

    def channels(self) -> list[str]:
        each, elsewhere = variants(self).values(), self.teacher_pretrained or self.has_complete_bank
        teacher = ["teacher"] if any(own.has_teacher for own in each) and not elsewhere else []
        cache = [self.teacher_cache.channel] if self.teacher_cache and self.teacher_cache.channel else []
        start = ["weights"] if any(own.pretrained == "channel" for own in each) else []
        return super().channels() + teacher + cache + start

    def training_channels(self) -> list[str]:
        if self.unlabelled is None:
            return super().training_channels()
        return ["unlabelled"] if self.unlabelled.alone else [*super().training_channels(), "unlabelled"]

    def conditions(self) -> list[tuple[str, bool, str]]:
        if self.students is not None:  # each is checked with its own settings
            own = [one.get("student_options", self.student_options) for one in self.students.values()]
            seen = {str(options.get("in_chans", 3)) for options in own if isinstance(options, dict)}
            number, channels = len(self.students), len(seen)
            return [
                ("students", 1 <= number <= MAX_STUDENTS, f"1 to {MAX_STUDENTS} of them, by name"),
                ("students", channels <= 1, "the same in_chans in all student_options: students share their images"),
                (
                    "cuda_graphs",
                    self.cuda_graphs is not True,
                    "auto or false with students: one student's graphs would overwrite another's gradients",
                ),
            ]
        one_teacher, served = isinstance(self.teacher, str), self.teacher_servers is not None
        complete = self.has_complete_bank
        alone = self.unlabelled is not None and self.unlabelled.alone
        return super().conditions() + [
            ("student", self.student != "", "a timm model's name"),
            ("student_options", self.student_options.get("in_chans", 3) in (1, 3), IN_CHANS),
            ("teacher_options", not complete or not self.teacher_options, f"empty {AS_COMPLETE}"),
            (
                "teacher_options",
                not self.teacher_options or one_teacher,
                "empty unless `teacher` names one model",
            ),
            ("teacher_pretrained", not complete or not self.teacher_pretrained, f"false {AS_COMPLETE}"),
            ("teacher_pretrained", not self.teacher_pretrained or self.teacher is not None, "false without `teacher`"),
            ("teacher", not complete or self.teacher is None, f"null {AS_COMPLETE}"),
            ("teacher_precision", not complete or self.teacher_precision is None, f"null {AS_COMPLETE}"),
            ("compile_teacher", not complete or self.compile_teacher is not True, f"auto or false {AS_COMPLETE}"),
            ("min_teacher_accuracy", not complete or self.min_teacher_accuracy == 0, f"0 {AS_COMPLETE}"),
            (
                "teacher_cache",
                self.teacher_cache is None or (self.has_teacher and not served and not self.teacher_stream),
                "null if there is no teacher, or with teacher_servers or teacher_stream",
            ),
            ("teacher_stream", not (served and self.teacher_stream), "false with teacher_servers"),
            (
                "teacher_servers",
                not served or (self.teacher_weight > 0 and self.worker_type == "remote"),
                "null unless there is a teacher and worker_type is remote",
            ),
            (
                "views_per_decode",
                not (self.teacher_cache and self.views_per_decode > 0)
                or self.teacher_cache.views % self.views_per_decode == 0,
                "a divisor of teacher_cache.views",
            ),
            ("teacher", self.features is None or not isinstance(self.teacher, list), "one model with features"),
            ("features", not (self.features and served), "null with teacher_servers, which send logits"),
            ("features", not (self.features and complete), f"null {AS_COMPLETE}"),
            (
                "without_servers",
                not served or self.without_servers == "fail",
                "fail with teacher_servers: training processes have no teacher of their own",
            ),
            ("compile_teacher", not served or self.compile_teacher is not True, "auto or false with teacher_servers"),
            ("unlabelled", self.unlabelled is None or self.has_teacher, "null if there is no teacher"),
            (
                "hard_label_weight",
                not alone or self.hard_label_weight == 0,
                "0 with unlabelled.alone: no image has a label",
            ),
            ("images_per_class", not alone or self.images_per_class is None, "null with unlabelled.alone"),
        ]


@dataclass(frozen=True, kw_only=True)
class LabellingSettings(DistillationSettings):
    """Settings of label_images.py: those of the training runs that its answers are for."""

    @property
    def one_pass_per_step(self) -> bool:
        return True  # there are no gradients

    def conditions(self) -> list[tuple[str, bool, str]]:
        return super().conditions() + [
            ("teacher_cache", self.teacher_cache is not None, "a mapping with views: it names the label bank"),
            ("teacher_cache", not self.has_complete_bank, "without complete: the teacher fills the bank"),
            ("probe_seconds", self.probe_seconds == 0, "0: nothing is trained"),
        ]
