"""The settings of the kit's scripts. Standard library only, so that the launcher can check a config without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from training.settings import fixed_part, limits, require, setting
from training.settings.features import FeatureSettings

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
WorkerKind = Literal["threads", "processes", "loader"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of every training script."""

    epochs: int = setting(10, at_least=1, on_resume="may change")
    """Passes over the training images."""
    max_steps: int | None = setting(None, at_least=1, on_resume="may change")
    """Stop after this many optimizer steps; the learning-rate schedule ends there too. None: as `epochs` says."""
    global_batch_size: int = setting(64, at_least=1)
    """Images an optimizer step, over all processes. It must divide by their number."""
    batch_size_per_device: int | Literal["auto"] | None = setting(None, at_least=1, on_resume="may change")
    """Images that a process passes through the model at once; gradients of several such parts are accumulated to the global
    batch. auto: the largest that fits into the memory. None: the process's whole share of the global batch."""
    optimizer: Literal["adamw", "nadam", "radam", "sgd"] = "adamw"
    """torch.optim's; all with decoupled weight decay but sgd, which has Nesterov momentum 0.9."""
    zero: bool = setting(False, on_resume="may change")
    """Share the optimizer's state among the processes: ZeroRedundancyOptimizer (ZeRO stage 1, https://arxiv.org/abs/1910.02054)."""
    learning_rate: float = setting(1e-3, above=0)
    """Peak learning rate, after the warm-up."""
    weight_decay: float = setting(0.05, at_least=0)
    """Weight decay; biases and normalisation weights get none."""
    warmup_fraction: float = setting(0.1, at_least=0, at_most=1)
    """Share of the steps in which the learning rate rises linearly from 0."""
    max_grad_norm: float | None = setting(1.0, above=0)
    """Gradients are scaled down to this L2 norm. None: never."""
    ema_decay: float | None = setting(None, above=0, below=1)
    """Also keep an exponential moving average of the weights with this decay a step; it is then what is evaluated and exported."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Of matrix products and convolutions. auto: bf16 on a GPU that has it, else fp32. fp32; tf32 (CUDA, fp32 with 10 bits of
    mantissa); bf16 or fp16 by autocast, weights in fp32 and TF32 for what autocast leaves in fp32; fp16 with a gradient scaler."""
    compile: bool | Literal["auto"] = setting("auto", on_resume="may change")
    """Pass the trained model through torch.compile. auto: where it was measured to pay, which is one process on a GPU of the H100's
    generation, as CUDA graphs, in 5,000 steps or more."""
    cuda_graphs: bool | Literal["auto"] = setting("auto", on_resume="may change")
    """Have what is compiled run as CUDA graphs, each of which the host launches as one: much faster where batches are small. Not with
    accumulated gradients or several students, whose gradients the graphs would overwrite. auto: where it was measured, as `compile`."""
    channels_last: bool | None = setting(None, on_resume="may change")
    """Memory order of images and weights. None: channels last for convolutional models."""
    cudnn_benchmark: bool = setting(False, on_resume="may change")
    """On a GPU, have cuDNN time its algorithms for each convolution and shape at its first batch, and take the fastest; else it goes by
    rules of thumb. Two runs may then choose differently, and round differently."""
    static_graph: bool = setting(False, on_resume="may change")
    """Tell DistributedDataParallel that every step uses the same parameters; it then orders its reductions once."""
    gradient_compression: Literal["none", "bf16"] = setting("none", on_resume="may change")
    """What processes exchange as gradients: as they are, or as bf16, half the bytes. Not with smddp."""
    horizontal_flip: bool = False
    """Mirror half of the training images."""
    seed: int = setting(0, at_least=0, at_most=2**32 - 1)
    """Seed of the initial weights, the order of images and their augmentation."""
    preprocessing: Literal["cpu", "cpu_reference", "dali"] = "cpu"
    """How training images become pixels: cpu, the fast pipeline; cpu_reference, Pillow alone; dali, NVIDIA DALI, on a GPU where there
    is one. Held-out images always take the reference pipeline."""
    on_broken_image: Literal["skip", "fail"] = setting("skip", on_resume="may change")
    """What happens where a file is no image, or a damaged one. skip: the next readable image is trained on in its place, an
    evaluation leaves it out, and broken_images.txt among the output names it. fail: the run ends, and names it."""
    num_workers: int | Literal["auto"] = setting("auto", at_least=0, on_resume="may change")
    """Workers that decode images, per training process. 0: the training process itself. auto: from the cores that it may use and
    from what an image costs. Which images make a batch, and their pixels, never depend on it."""
    worker_type: Literal["auto", "threads", "processes", "loader", "remote"] = setting("auto", on_resume="may change")
    """What makes the training images. threads share the training process; processes cost more for an image, and are there for what
    holds Python's lock; loader: processes that put batches into memory that all share, pinned for a GPU.
    auto: threads with preprocessing cpu on the CPU, else processes: a thread that decodes holds the lock that launching a GPU's kernels
    needs. remote: the hosts of the instance groups that do not train, by Ray; held-out images are made as with auto."""
    without_servers: Literal["go_on", "fail"] = setting("go_on", on_resume="may change")
    """With worker_type remote, where no other host has made an image for 30 s: make them in the training processes, until one is back;
    or fail. With teacher_servers only fail, after half of process_group_minutes."""
    shuffle_window_shards: int = setting(32, at_least=1)
    """Where the training images come in shards, those among which images are shuffled; more mix better, and take more disk."""
    shard_cache_gb: float | None = setting(None, above=0, on_resume="may change")
    """Where shards come by FastFile, disk for copies of them on each host, in 10^9 bytes. None: half of what is free."""
    log_every: int = setting(10, at_least=1, on_resume="may change")
    """Steps between two metric lines."""
    evaluate_every: int = setting(1, at_least=1, on_resume="may change")
    """Epochs between two evaluations on the validation images; the last step is always followed by one."""
    checkpoint_every: int | None = setting(None, at_least=1, on_resume="may change")
    """Optimizer steps between two checkpoints. None: one at the end of each epoch. A stop is always followed by one."""
    keep_checkpoints: int = setting(2, at_least=1, on_resume="may change")
    """How many of the newest are kept."""
    system_monitor: bool = setting(True, on_resume="may change")
    """Sample each host's cores, memory, disks, network and GPUs while it trains, in SageMaker Debugger's format, every
    profiling.system_interval_ms of the job or 500 ms, into profiler-output of its output folder."""
    profile_steps: int = setting(
        0, at_least=0, at_most=300, why="a trace grows by megabytes a step", on_resume="may change"
    )
    """Steps of the first process that torch.profiler records: operators.json lists operators and kernels by their time, and
    trace.json.gz opens in Perfetto. They are slower than others. 0: none."""
    profile_after: int = setting(10, at_least=0, on_resume="may change")
    """Steps that come before these, in which memory is allocated and libraries choose their kernels."""
    probe_seconds: float = setting(0.0, at_least=0, on_resume="may change")
    """Measure instead of training, until about N seconds after the process's start: whole steps, steps on one batch over and
    over, without a teacher, and the input side alone by its number of workers, or as it is with worker_type remote; probe.json in the
    output folder has the speeds. There is no checkpoint and no model. `launcher diagnose RUN --probe` sets it. 0: train."""
    process_group_minutes: float = setting(10.0, above=0, on_resume="may change")
    """How long processes wait for each other, at the start and in every collective."""

    def __post_init__(self) -> None:
        require(*self.conditions())

    def channels(self) -> list[str]:
        """The data channels that the script reads; the launcher refuses a job that lacks one."""
        return [*self.training_channels(), "validation"]

    def training_channels(self) -> list[str]:
        """Those of the training images."""
        return ["train"]

    @property
    def one_pass_per_step(self) -> bool:
        """Whether a step has one forward and one backward pass of one model, so that no gradient waits for another pass."""
        return self.batch_size_per_device is None

    def fingerprint(self) -> dict[str, Any]:
        """The settings that a checkpoint must have been saved with, so that a run may go on from it; JSON-ready."""
        return fixed_part(self)

    def conditions(self) -> list[tuple[str, bool, str]]:
        """What must hold, as (setting, holds, valid): the range of each field, and what fields must hold together."""
        remote = self.worker_type == "remote"
        return [
            *limits(self),
            ("worker_type", not remote or self.preprocessing != "dali", "another one with preprocessing dali"),
            (
                "cuda_graphs",
                self.cuda_graphs is not True or self.one_pass_per_step,
                "auto or false with batch_size_per_device: its graphs would overwrite gradients that are accumulated",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class LabelledImageSettings(TrainingSettings):
    """Settings of every script that learns one class an image."""

    label_smoothing: float = setting(0.0, at_least=0, below=1)
    """Weight of the uniform distribution in the label loss (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567)."""
    images_per_class: int | None = setting(None, at_least=1)
    """Train on at most the first N images of each class, by file name. None: on all."""
    image_size: int = setting(224, at_least=8)
    """Height and width in pixels of what the models see."""
    augmentation_load: int = setting(0, at_least=0)
    """Rounds of mirroring, turning upside down (half of the times each) and rotating by up to 5 degrees, before anything else."""
    compose_augmentation: bool = False
    """Turns, crop, scaling, rotation, shift and mirroring as one warp, with preprocessing cpu: many rounds then cost as much as
    one, and what a round turns out of the image is not lost when the next one turns it back."""
    min_crop_area: float = setting(1.0, above=0, at_most=1)
    """Smallest share of the image that a random crop keeps; 1: no random crop."""
    max_shift_pixels: int = 0
    """Shift training images by up to this many pixels of `image_size` in each direction."""
    max_rotation_degrees: float = setting(0.0, at_least=0, at_most=180)
    """Rotate training images by up to this many degrees either way."""
    mixup: float = setting(0.0, at_least=0)
    """Alpha of the beta distribution by which two images are blended (https://arxiv.org/abs/1710.09412). 0: never."""
    cutmix: float = setting(0.0, at_least=0)
    """Alpha of the beta distribution by which a part of another image is pasted in (https://arxiv.org/abs/1905.04899). 0: never."""
    mix_probability: float = setting(1.0, at_least=0, at_most=1)
    """Share of the images that are mixed; with both, half of these by each."""
    random_erasing: float = setting(0.0, at_least=0, at_most=1)
    """Share of the images of which a random box is replaced by noise (https://arxiv.org/abs/1708.04896)."""
    views_per_decode: int = setting(1, at_least=1)
    """Views of an image that come one after the other, made from one decoding of its file, as in FKD
    (https://arxiv.org/abs/2112.01528): N epochs then visit each image once, each of them an N-th of the images. It pays where
    decoding is the bottleneck. A batch shows fewer images: best an even number of them, for mixing, and batch_size_per_device a
    multiple of it. A run of fewer steps than N epochs leaves images out."""
    export_onnx: bool = setting(False, on_resume="may change")
    """Also write model.onnx, checked against PyTorch; needs the packages onnx and onnxruntime."""

    def conditions(self) -> list[tuple[str, bool, str]]:
        composed = self.compose_augmentation and self.preprocessing != "cpu"
        return super().conditions() + [
            ("compose_augmentation", not composed, "false, or with preprocessing cpu"),
            ("max_shift_pixels", 0 <= self.max_shift_pixels < self.image_size, "from 0 to below image_size"),
            (
                "epochs",
                self.max_steps is not None or self.views_per_decode < 1 or self.epochs % self.views_per_decode == 0,
                "a multiple of views_per_decode: in that many epochs each image comes once",
            ),
            (
                "views_per_decode",
                self.views_per_decode == 1 or self.preprocessing != "dali",
                "1 with preprocessing dali, which decodes each view",
            ),
            (
                "views_per_decode",
                self.views_per_decode < 1 or self.global_batch_size % self.views_per_decode == 0,
                "a divisor of global_batch_size, which then holds all views of its images",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings(LabelledImageSettings):
    """Settings of train_classifier.py."""

    model: str
    """A timm model's name, for example vit_small_patch16_224."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for timm.create_model, for example {img_size: 32, patch_size: 4, depth: 6}."""
    pretrained: bool | Literal["channel"] = False
    """Start from timm's published weights, for which the training machine must reach the Hugging Face hub. channel: from those in the
    channel `weights`, of a run, the hub or `launcher weights`; a head of other classes is new."""
    trained_layers: Literal["all", "head"] = "all"
    """head: a linear probe. All other layers stay as they are, and dropout is off."""
    probe_input_images: int = setting(0, at_least=0)
    """Before training, make batches of N images and drop them, to measure the input side alone. 0: no."""
    probe_image_size: int | None = setting(None, at_least=8)
    """Height and width in pixels of the images that are made for that. None: image_size."""
    repeat_batch: bool = False
    """Every step gets the first batch again: how fast the model is alone. It learns nothing of use."""

    def channels(self) -> list[str]:
        return super().channels() + (["weights"] if self.pretrained == "channel" else [])

    def conditions(self) -> list[tuple[str, bool, str]]:
        other_size = self.probe_image_size is not None and self.worker_type == "remote"
        return [
            *super().conditions(),
            ("probe_image_size", not other_size, "null with worker_type remote"),
            ("trained_layers", self.trained_layers == "all" or self.pretrained is not False, "all without pretrained"),
        ]


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(TrainingSettings):
    """Settings of every script that may learn from a teacher as well as from labels."""

    teacher_precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Of the teacher's weights and arithmetic, whatever the student's. None: bf16 or fp16 where `precision` is, else fp32."""
    compile_teacher: bool | Literal["auto"] = setting("auto", on_resume="may change")
    """Pass the teacher through torch.compile. auto: as `compile`."""
    temperature: float = setting(4.0, above=0)
    """Both models' logits are divided by it before the softmax."""
    hard_label_weight: float = 0.5
    """Weight of the label loss. 1, with no teacher_loss_weight and no features: labels alone; no teacher is loaded or run."""
    teacher_loss_weight: float | None = setting(None, at_least=0)
    """Weight of the teacher's part. None: 1 - hard_label_weight."""
    features: FeatureSettings | None = None
    """Learn the teacher's features beside its logits, or with teacher_loss_weight 0 instead of them. {}: with the defaults. None: no."""

    @property
    def teacher_weight(self) -> float:
        """The weight of the teacher's logits in the loss."""
        return 1 - self.hard_label_weight if self.teacher_loss_weight is None else self.teacher_loss_weight

    @property
    def has_teacher(self) -> bool:
        """Whether anything is learned from a teacher: its logits, or its features."""
        return self.teacher_weight > 0 or self.features is not None

    @property
    def teacher_number_format(self) -> Literal["fp32", "bf16", "fp16"]:
        """Of the teacher's weights: teacher_precision, or what follows from the student's precision."""
        if self.teacher_precision is not None:
            return self.teacher_precision
        return self.precision if self.precision in ("bf16", "fp16") else "fp32"

    def conditions(self) -> list[tuple[str, bool, str]]:
        most = 1 if self.teacher_loss_weight is None else float("inf")
        valid = "from 0 to 1; above 1 only beside teacher_loss_weight"
        headless = self.hard_label_weight == 0 and self.teacher_weight == 0
        least = 1 if self.features is None else self.features.least_images
        sizes = [size for size in (self.global_batch_size, self.batch_size_per_device) if isinstance(size, int)]
        return [
            *super().conditions(),
            ("hard_label_weight", 0 <= self.hard_label_weight <= most, valid),
            ("features", self.features is None or not headless, "null where nothing else trains the classifier"),
            ("features", min(sizes) >= least or least == 1, "not relational with fewer than 3 images at once"),
        ]
