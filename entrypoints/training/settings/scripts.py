"""The settings of the kit's scripts. Standard library only, so that the launcher can check a config without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from training.settings import fixed_part, limits, require, setting
from training.settings.features import FeatureSettings

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
WorkerKind = Literal["threads", "processes", "loader"]

IN_CHANS = "in_chans 1 for grey images or 3 for colour"
"""What is valid among the options of a model that sees the images as they are."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of every training script."""

    epochs: int = setting(10, at_least=1, on_resume="may change")
    """Passes over the training images."""
    max_steps: int | None = setting(None, at_least=1, on_resume="may change")
    """Stop after this many optimizer steps; the learning-rate schedule ends there too. None: train for `epochs`."""
    global_batch_size: int = setting(64, at_least=1)
    """Images per optimizer step, over all processes. The number of processes must divide it."""
    batch_size_per_device: int | Literal["auto"] | None = setting(None, at_least=1, on_resume="may change")
    """Images that a process passes through the model at once. Gradients of several passes are accumulated to make up the global batch.
    auto: the largest number that fits in memory. None: the process's whole share of the global batch."""
    optimizer: Literal["adamw", "nadam", "radam", "sgd"] = "adamw"
    """From torch.optim. All use decoupled weight decay except sgd, which uses Nesterov momentum 0.9."""
    zero: bool = setting(False, on_resume="may change")
    """Shard the optimizer's state across processes with ZeroRedundancyOptimizer (ZeRO stage 1, https://arxiv.org/abs/1910.02054). It saves
    memory and costs time: after each step all parameters are sent again, a share per process, and nothing hides it."""
    learning_rate: float = setting(1e-3, above=0)
    """Peak learning rate, after the warm-up."""
    weight_decay: float = setting(0.05, at_least=0)
    """Weight decay; biases and normalisation weights get none."""
    warmup_fraction: float = setting(0.1, at_least=0, at_most=1)
    """Fraction of the steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float | None = setting(1.0, above=0)
    """Clip gradients to this L2 norm. None: no clipping."""
    ema_decay: float | None = setting(None, above=0, below=1)
    """Also keep an exponential moving average of the weights with this decay per step, and evaluate and export that average."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Number format of matrix products and convolutions. auto: bf16 if the GPU has it, else fp32. tf32: CUDA only, fp32 with a 10-bit
    mantissa. bf16, fp16: autocast with fp32 weights; what autocast leaves in fp32 uses TF32. fp16 also uses a gradient scaler."""
    compile: bool | Literal["auto"] = setting("auto", on_resume="may change")
    """Compile the trained model with torch.compile. auto: only where measurements showed a gain: one process on a GPU of the H100's
    generation, with CUDA graphs, for 5,000 steps or more."""
    cuda_graphs: bool | Literal["auto"] = setting("auto", on_resume="may change")
    """Run compiled models as CUDA graphs. The host launches a graph with one call, which is much faster for small batches. Not with
    accumulated gradients or several students, whose gradients the graphs would overwrite. auto: only where it was measured, as for
    `compile`."""
    channels_last: bool | None = setting(None, on_resume="may change")
    """Use the channels-last memory format for images and weights. None: for convolutional models."""
    cudnn_benchmark: bool = setting(False, on_resume="may change")
    """On a GPU, let cuDNN time its algorithms on the first batch of each convolution and shape and use the fastest, instead of its
    heuristics. Two runs may then use different algorithms, which round differently."""
    copy_stream: bool = setting(False, on_resume="may change")
    """Copy each batch to the GPU on a separate CUDA stream while the previous step runs. host_to_device is then the time that a step still
    waits for the copy. Not with preprocessing dali, whose pixels are already on the GPU. Not measured on a GPU yet."""
    static_graph: bool = setting(False, on_resume="may change")
    """Tell DistributedDataParallel that every step uses the same parameters; it then orders its reductions once."""
    gradient_compression: Literal["none", "bf16"] = setting("none", on_resume="may change")
    """How processes exchange gradients. none: as they are. bf16: as bf16, half the bytes. Not with smddp."""
    horizontal_flip: bool = False
    """Mirror half of the training images."""
    seed: int = setting(0, at_least=0, at_most=2**32 - 1)
    """Seed of the initial weights, the order of images and their augmentation."""
    preprocessing: Literal["cpu", "cpu_reference", "dali"] = "cpu"
    """How training images are decoded and augmented. cpu: the fast pipeline. cpu_reference: Pillow alone. dali: NVIDIA DALI, on the GPU if
    there is one. Held-out images always use the reference pipeline."""
    on_broken_image: Literal["skip", "fail"] = setting("skip", on_resume="may change")
    """What to do if a file is damaged or not an image. skip: train on the next readable image instead, leave the image out of evaluations,
    and list it in broken_images.txt in the output. fail: name the file and end the run."""
    numa_binding: bool = setting(False, on_resume="may change")
    """Bind each process and its data workers to the cores next to its GPU, on hosts whose cores and GPUs span several NUMA nodes. Not
    measured on a GPU yet."""
    num_workers: int | Literal["auto"] = setting("auto", at_least=0, on_resume="may change")
    """Workers that decode images, per training process. 0: the training process decodes them itself. auto: chosen from the cores it may use
    and the cost of an image. Batches and their pixels never depend on the number."""
    worker_type: Literal["auto", "threads", "processes", "loader", "remote"] = setting("auto", on_resume="may change")
    """What prepares the training images. threads: inside the training process. processes: for preprocessing that holds the GIL; they cost
    more per image. loader: processes that write batches to shared memory, pinned for a GPU. auto: threads with preprocessing cpu if there
    is no GPU, else processes, since decoding threads hold the GIL, which launching GPU kernels needs. remote: the hosts of the instance
    groups that do not train, through Ray; held-out images are prepared as with auto."""
    without_servers: Literal["go_on", "fail"] = setting("go_on", on_resume="may change")
    """With worker_type remote: what to do if no other host has made an image for 30 s. go_on: make images in the training processes until
    one is back. fail: end the run. teacher_servers require fail, which then waits half of process_group_minutes."""
    shuffle_window_shards: int = setting(32, at_least=1)
    """If the training images come in shards: how many shards to shuffle images among. More shards mix better but take more disk."""
    shard_cache_gb: float | None = setting(None, above=0, on_resume="may change")
    """If shards come by FastFile: disk for copies of them on each host, in GB (10^9 bytes). None: half of the free space."""
    log_every: int = setting(10, at_least=1, on_resume="may change")
    """Steps between two metric lines."""
    late_metrics: bool = setting(False, on_resume="may change")
    """On a GPU, read a metric line's losses and times when the next step is submitted, which the GPU computes meanwhile; before a
    checkpoint, an evaluation, a stop and the end of an epoch, at once. A loss that is not finite may then be noticed a step later, and a
    run that fails in that step lacks the line. The labelling scripts read all at once. Not measured on a GPU yet."""
    evaluate_every: int = setting(1, at_least=1, on_resume="may change")
    """Epochs between evaluations on the validation images. One always follows the last step."""
    checkpoint_every: int | None = setting(None, at_least=1, on_resume="may change")
    """Optimizer steps between checkpoints; there is also one before each evaluation. None: one at the end of each epoch. A run that is
    stopped always saves one."""
    keep_checkpoints: int = setting(2, at_least=1, on_resume="may change")
    """Number of newest checkpoints kept."""
    checkpoint_writing: Literal["auto", "inline", "background"] = setting("auto", on_resume="may change")
    """inline: training waits while a checkpoint is written. background: it waits for a copy in main memory, which a thread writes while
    training goes on; a process that is killed meanwhile loses the steps since the checkpoint before. auto: background on a GPU, inline on
    CPUs, where writing would take cores from training."""
    system_monitor: bool = setting(True, on_resume="may change")
    """Sample each host's cores, memory, disks, network and GPUs while it trains, every profiling.system_interval_ms of the job or 500 ms.
    The samples go to profiler-output in its output folder, in SageMaker Debugger's format."""
    profile_steps: int = setting(
        0, at_least=0, at_most=300, why="a trace grows by megabytes per step", on_resume="may change"
    )
    """Steps of the first process that torch.profiler records. operators.json lists operators and kernels by time; trace.json.gz opens in
    Perfetto. Recorded steps are slower than others. 0: none."""
    profile_after: int = setting(10, at_least=0, on_resume="may change")
    """Steps before the recorded ones, in which memory is allocated and libraries choose their kernels."""
    probe_seconds: float = setting(0.0, at_least=0, on_resume="may change")
    """Measure speed instead of training, until about N seconds after the process started: whole steps, steps that repeat one batch, the
    same without a teacher, and the input side alone for several numbers of workers (with worker_type remote: as it is). The speeds are in
    probe.json in the output folder. The run leaves no checkpoint and no model. `launcher diagnose RUN --probe` sets this. 0: train."""
    process_group_minutes: float = setting(10.0, above=0, on_resume="may change")
    """Minutes that processes wait for each other, at the start and in every collective."""

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
            ("worker_type", not remote or self.preprocessing != "dali", "not remote with preprocessing dali"),
            ("copy_stream", not self.copy_stream or self.preprocessing != "dali", "false with preprocessing dali"),
            (
                "cuda_graphs",
                self.cuda_graphs is not True or self.one_pass_per_step,
                "auto or false with batch_size_per_device: graphs would overwrite accumulated gradients",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class LabelledImageSettings(TrainingSettings):
    """Settings of every script that learns one class per image."""

    label_smoothing: float = setting(0.0, at_least=0, below=1)
    """Weight of the uniform distribution in the label loss (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567)."""
    images_per_class: int | None = setting(None, at_least=1)
    """Train on at most the first N images of each class, by file name. None: on all."""
    image_size: int = setting(224, at_least=8)
    """Height and width in pixels of the models' input."""
    augmentation_load: int = setting(0, at_least=0)
    """Rounds of horizontal flip, vertical flip (each with probability 0.5) and rotation by up to 5 degrees, before all other
    augmentation."""
    compose_augmentation: bool = False
    """With preprocessing cpu: apply augmentation_load, crop, scaling, rotation, shift and mirroring as one warp. Many rounds then cost as
    much as one, and what one round rotates out of the image is not lost if the next one rotates it back."""
    min_crop_area: float = setting(1.0, above=0, at_most=1)
    """Smallest share of the image's area that a random crop keeps. 1: no random crop."""
    max_shift_pixels: int = 0
    """Shift training images by up to this many pixels of `image_size` in each direction."""
    max_rotation_degrees: float = setting(0.0, at_least=0, at_most=180)
    """Rotate training images by up to this many degrees either way."""
    mixup: float = setting(0.0, at_least=0)
    """Alpha of the beta distribution for blending two images (https://arxiv.org/abs/1710.09412). 0: never."""
    cutmix: float = setting(0.0, at_least=0)
    """Alpha of the beta distribution for pasting in a part of another image (https://arxiv.org/abs/1905.04899). 0: never."""
    mix_probability: float = setting(1.0, at_least=0, at_most=1)
    """Share of images that are mixed. With mixup and cutmix, each mixes half of them."""
    random_erasing: float = setting(0.0, at_least=0, at_most=1)
    """Share of the images in which noise replaces a random box (https://arxiv.org/abs/1708.04896)."""
    views_per_decode: int = setting(1, at_least=1)
    """Consecutive views to make from one decoding of an image, as in FKD (https://arxiv.org/abs/2112.01528). With N views, an epoch visits
    1/N of the images, and N epochs visit each image once. It pays off if decoding is the bottleneck. A batch then shows fewer images; for
    mixing, their number is best even. Make batch_size_per_device a multiple of N. A run shorter than N epochs leaves images out."""
    export_onnx: bool = setting(False, on_resume="may change")
    """Also write model.onnx, checked against PyTorch; needs the packages onnx and onnxruntime. If that fails after training, the log says
    why, and the run ends without it."""

    def conditions(self) -> list[tuple[str, bool, str]]:
        composed = self.compose_augmentation and self.preprocessing != "cpu"
        return super().conditions() + [
            ("compose_augmentation", not composed, "false unless preprocessing is cpu"),
            ("max_shift_pixels", 0 <= self.max_shift_pixels < self.image_size, "from 0 to below image_size"),
            (
                "epochs",
                self.max_steps is not None or self.views_per_decode < 1 or self.epochs % self.views_per_decode == 0,
                "a multiple of views_per_decode: that many epochs visit each image once",
            ),
            (
                "views_per_decode",
                self.views_per_decode == 1 or self.preprocessing != "dali",
                "1 with preprocessing dali, which decodes each view",
            ),
            (
                "views_per_decode",
                self.views_per_decode < 1 or self.global_batch_size % self.views_per_decode == 0,
                "a divisor of global_batch_size: a batch holds all views of its images",
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
    """Start from timm's published weights; the training machine must reach the Hugging Face hub. channel: start from the weights in the
    channel `weights`, which come from a run, the hub or `launcher weights`; a head for other classes starts anew."""
    trained_layers: Literal["all", "head"] = "all"
    """head: a linear probe. All other layers are frozen, and dropout is off."""
    probe_input_images: int = setting(0, at_least=0)
    """Before training, make batches for N images and discard them, to measure the input side alone. 0: off."""
    probe_image_size: int | None = setting(None, at_least=8)
    """Height and width in pixels of the images of probe_input_images. None: image_size."""
    repeat_batch: bool = False
    """Train every step on the first batch, to measure the model's speed alone. The model learns nothing useful."""

    def channels(self) -> list[str]:
        return super().channels() + (["weights"] if self.pretrained == "channel" else [])

    def conditions(self) -> list[tuple[str, bool, str]]:
        other_size = self.probe_image_size is not None and self.worker_type == "remote"
        return [
            *super().conditions(),
            ("probe_image_size", not other_size, "null with worker_type remote"),
            ("trained_layers", self.trained_layers == "all" or self.pretrained is not False, "all without pretrained"),
            ("model_options", self.model_options.get("in_chans", 3) in (1, 3), IN_CHANS),
        ]


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(TrainingSettings):
    """Settings of every script that can learn from a teacher as well as from labels."""

    teacher_precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Number format of the teacher's weights and arithmetic, whatever the student's. None: bf16 or fp16 if `precision` is, else fp32.
    fp8: the linear layers in fp8, the rest in bf16; compile_teacher fuses the scaling. Needs torch 2.9. Not measured on a GPU yet."""
    compile_teacher: bool | Literal["auto"] = setting("auto", on_resume="may change")
    """Compile the teacher with torch.compile. auto: as for `compile`."""
    teacher_stream: bool = setting(False, on_resume="may change")
    """Run the teacher on a separate CUDA stream, during the student's step on the previous batch; the GPU then needs memory for both.
    teacher_forward is then the time that the student still waits. Requires copy_stream. Not with teacher_cache, nor with CUDA graphs, which
    share memory. Not measured on a GPU yet."""
    temperature: float = setting(4.0, above=0)
    """Both models' logits are divided by it before the softmax."""
    hard_label_weight: float = 0.5
    """Weight of the label loss. 1, without teacher_loss_weight and features: train on labels alone, and load no teacher."""
    teacher_loss_weight: float | None = setting(None, at_least=0)
    """Weight of the teacher's part. None: 1 - hard_label_weight."""
    features: FeatureSettings | None = None
    """Learn the teacher's features as well as its logits or, with teacher_loss_weight 0, instead of them. {}: with the defaults. None:
    no."""

    @property
    def teacher_weight(self) -> float:
        """The weight of the teacher's logits in the loss."""
        return 1 - self.hard_label_weight if self.teacher_loss_weight is None else self.teacher_loss_weight

    @property
    def has_teacher(self) -> bool:
        """Whether anything is learned from a teacher: its logits, or its features."""
        return self.teacher_weight > 0 or self.features is not None

    @property
    def teacher_number_format(self) -> Literal["fp32", "bf16", "fp16", "fp8"]:
        """Of the teacher's weights: teacher_precision, or what follows from the student's precision."""
        if self.teacher_precision is not None:
            return self.teacher_precision
        return self.precision if self.precision in ("bf16", "fp16") else "fp32"

    def conditions(self) -> list[tuple[str, bool, str]]:
        most = 1 if self.teacher_loss_weight is None else float("inf")
        valid = "from 0 to 1; above 1 only with teacher_loss_weight"
        headless = self.hard_label_weight == 0 and self.teacher_weight == 0
        least = 1 if self.features is None else self.features.least_images
        sizes = [size for size in (self.global_batch_size, self.batch_size_per_device) if isinstance(size, int)]
        return [
            *super().conditions(),
            ("hard_label_weight", 0 <= self.hard_label_weight <= most, valid),
            ("features", self.features is None or not headless, "null if nothing else trains the classifier"),
            ("features", min(sizes) >= least or least == 1, "not relational with fewer than 3 images at once"),
            (
                "teacher_stream",
                not self.teacher_stream or self.copy_stream,
                "false without copy_stream, which copies the teacher's images",
            ),
            (
                "cuda_graphs",
                not self.teacher_stream or self.cuda_graphs is not True,
                "auto or false with teacher_stream: graphs share memory",
            ),
        ]
