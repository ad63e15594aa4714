"""Job: what one config file says, typed and frozen. A Job touches neither the network nor the disk."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from launcher.config.redaction import redact
from launcher.show import html

Distribution = Literal["smddp", "torchrun", "none"]
Pipeline = Literal["cpu_reference", "cpu", "cpu_composed", "dali"]
"""A preprocessing pipeline: the setting `preprocessing`; cpu_composed is cpu with compose_augmentation."""
Text = Annotated[str, StringConstraints(min_length=1)]
S3Uri = Annotated[str, StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$", max_length=1024)]
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""
InstanceType = Annotated[str, StringConstraints(pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$")]

MAX_HOSTS = 1000
"""More hosts in one job than any quota of SageMaker's; what a slip of the finger makes."""

A_FOLDER_IN_S3 = "s3://bucket/prefix"


class Part(BaseModel):
    """A piece of a job: frozen, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class InstanceGroup(Part):
    """Hosts of one type in a cluster of several types."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="letters, digits, dots, hyphens and underscores, 64 at most",
        examples=["gpus"],
    )
    instance_type: InstanceType = Field(description="an instance type, ml. first", examples=["ml.p4d.24xlarge"])
    instance_count: int = Field(ge=1, le=MAX_HOSTS, description=f"a whole number from 1 to {MAX_HOSTS}", examples=[2])


class Compute(Part):
    """The machines."""

    instance_type: InstanceType | None = Field(
        None, description="an instance type of SageMaker, ml. first", examples=["ml.p4d.24xlarge"]
    )
    """The kind of host on SageMaker. Runs on this machine leave it aside."""
    instance_count: int = Field(
        1, ge=1, le=MAX_HOSTS, description=f"a whole number from 1 to {MAX_HOSTS}", examples=[2]
    )
    """Hosts. On this machine each is a process tree with a loopback address of its own."""
    instance_groups: list[InstanceGroup] = Field(
        default_factory=list,
        description="a list of {name, instance_type, instance_count}",
        examples=["[{name: gpus, instance_type: ml.p4d.24xlarge, instance_count: 2}]"],
    )
    """In place of instance_type and instance_count: hosts of several types, SageMaker only."""
    training_groups: list[Text] = Field(
        default_factory=list, description="names of instance groups", examples=["[gpus]"]
    )
    """The instance group that `distribution` spreads over, where there are groups."""
    processes_per_host: int | None = Field(
        None, ge=1, le=1024, description="a whole number from 1 to 1024, or null", examples=[2]
    )
    """Training processes a host, on this machine; null: one a GPU, or one where there is none. SageMaker takes one a GPU."""
    volume_gb: int = Field(30, ge=1, le=16384, description="GB, a whole number from 1 to 16384", examples=[500])
    """Disk of each host, in GB, for data, code, model and checkpoints. 30 is SageMaker's SDK's own default; a disk of EBS has at
    most 16 TiB: https://docs.aws.amazon.com/ebs/latest/userguide/volume_constraints.html"""
    shm_gb: float | None = Field(None, gt=0, le=4096, description="GB, above 0 and at most 4096", examples=[8])
    """Shared memory of each host (/dev/shm) in local mode; null: half of this machine's memory, shared among the hosts."""
    max_hours: float = Field(24.0, gt=0, le=28 * 24, description="hours, above 0 and at most 672", examples=[1.5])
    """The run is stopped after this long, in hours. 672 (28 days) is SageMaker's own maximum of MaxRuntimeInSeconds."""
    spot: bool = Field(False, description="true or false")
    """Spare capacity at a lower price; the job may be interrupted and is then started again."""
    max_wait_hours: float | None = Field(None, gt=0, le=28 * 24, description="hours, at least max_hours", examples=[48])
    """With spot: training and waiting together end after this long, in hours. null: twice max_hours, at most 672."""
    keep_alive_minutes: float | None = Field(None, gt=0, le=360, description="minutes, at most 360", examples=[30])
    """Warm pool: the hosts stay, and are paid, this long after the job, and the next alike starts at once. 360 is botocore 1.44's
    maximum of KeepAlivePeriodInSeconds."""
    max_attempts: int | None = Field(None, ge=1, le=30, description="a whole number from 1 to 30", examples=[3])
    """How often SageMaker starts the job again after an internal error of its own."""
    training_plan: Text | None = Field(None, description="the ARN of a reserved training plan")
    volume_key: Text | None = Field(None, max_length=2048, description="a KMS key's id, ARN or alias")
    """Encrypts the hosts' disks."""
    price_per_hour: float | None = Field(
        None, gt=0, description="US dollars an instance-hour, above 0", examples=[32.77]
    )
    """What an instance-hour costs you; null: AWS's price list, as it was last read (`launcher plan --check`)."""


class Image(Part):
    """The container image: one of AWS's by its PyTorch and Python version, or any by its address."""

    framework_version: Text | None = Field(None, description="a PyTorch version of AWS's images", examples=['"2.0.0"'])
    python: str | None = Field(None, pattern=r"^py[23]\d{0,2}$", description="py310, for example", examples=["py310"])
    uri: str | None = Field(
        None, pattern=r"^\S{1,255}$", description="an image's address in a registry, at most 255 characters"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Image:
        if (self.uri is None) == (self.framework_version is None and self.python is None):
            raise ValueError("give either uri, or framework_version and python")
        if self.uri is None and (self.framework_version is None or self.python is None):
            raise ValueError("framework_version and python go together")
        return self


class Input(Part):
    """One data channel: exactly one of folder, file, run, s3, fsx and efs, and how SageMaker brings it."""

    SOURCES: ClassVar[tuple[str, ...]] = ("folder", "file", "run", "s3", "fsx", "efs")

    folder: Text | None = Field(None, description="a folder on this machine", examples=["data/digits/train"])
    """A folder on this machine, relative to where the command runs. Read in place here; uploaded below `output` for SageMaker."""
    file: Text | None = Field(None, description="a file on this machine", examples=["teacher/model.safetensors"])
    """A file on this machine; the channel holds it under its own name."""
    run: Text | None = Field(
        None, description="an earlier run, or the name of its job", examples=["quickstart-teacher"]
    )
    """An earlier run, by its name or by its job's name (then the latest that completed): the channel holds its model.tar.gz."""
    s3: S3Uri | None = Field(None, description="an s3:// address", examples=[A_FOLDER_IN_S3])
    """Everything below a prefix in S3, or a manifest there."""
    fsx: str | None = Field(
        None,
        pattern=r"^fs-[0-9a-f]{8,40}$",
        description="the id of an FSx for Lustre file system",
        examples=["fs-0123456789abcdef0"],
    )
    efs: str | None = Field(
        None,
        pattern=r"^fs-[0-9a-f]{8,40}$",
        description="the id of an EFS file system",
        examples=["fs-0123456789abcdef0"],
    )
    path: str | None = Field(
        None, pattern=r"^/\S*$", description="with fsx or efs: an absolute path", examples=["/fsx/food/train"]
    )
    """With fsx or efs: the folder there. FSx paths begin with the file system's mount name."""
    access: Literal["ro", "rw"] | None = Field(None, description="ro or rw", examples=["ro"])
    """With fsx or efs: read only (ro, unless said) or read and write (rw)."""
    mode: Literal["File", "FastFile", "Pipe"] | None = Field(
        None, description="File, FastFile or Pipe", examples=["FastFile"]
    )
    """How SageMaker brings S3 data: File copies it to the disk before the start (unless said), FastFile streams files as they are
    read, Pipe is a named pipe."""
    sharded: bool | None = Field(None, description="true or false")
    """With S3: each host gets its share of the objects instead of all (ShardedByS3Key)."""
    data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] | None = Field(
        None, description="S3Prefix, ManifestFile or AugmentedManifestFile", examples=["ManifestFile"]
    )
    attributes: list[Text] | None = Field(None, description="a list of names", examples=["[source-ref, class]"])
    """With an AugmentedManifestFile: the attributes that the script gets."""
    shuffle_seed: int | None = Field(None, description="a whole number", examples=[1])
    """With S3: the objects' order is shuffled, anew each epoch in Pipe mode."""
    content_type: Text | None = Field(
        None, max_length=256, description="a media type", examples=["application/x-image"]
    )
    compression: Literal["None", "Gzip"] | None = Field(None, description="None or Gzip", examples=["Gzip"])
    record_wrapper: Literal["None", "RecordIO"] | None = Field(
        None, description="None or RecordIO", examples=["RecordIO"]
    )
    instance_groups: list[Text] | None = Field(None, description="names of instance groups", examples=["[gpus]"])
    """The groups that get this channel, where compute.instance_groups has several."""

    @property
    def source(self) -> str:
        """Which of SOURCES is given."""
        return next(name for name in self.SOURCES if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _exactly_one(self) -> Input:
        given = [name for name in self.SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'none'} of {', '.join(self.SOURCES)} given: give exactly one")
        on_file_system = given[0] in ("fsx", "efs")
        for_s3 = ("mode", "sharded", "data_type", "attributes", "shuffle_seed", "compression", "record_wrapper")
        wrong = [
            name
            for name in (*for_s3, "instance_groups") * on_file_system + ("path", "access") * (not on_file_system)
            if getattr(self, name) is not None
        ]
        if wrong:
            belongs = "data from S3" if on_file_system else "fsx and efs"
            raise ValueError(
                f"{', '.join(wrong)} with {given[0]}: only {belongs} can have {'it' if len(wrong) == 1 else 'them'}"
            )
        if on_file_system and self.path is None:
            raise ValueError(f"{given[0]} without path: say which folder of the file system")
        return self


class Checkpoints(Part):
    """Where checkpoints are kept."""

    s3: S3Uri = Field(description="an s3:// address", examples=[A_FOLDER_IN_S3])
    """SageMaker copies what the script writes to SM's checkpoint folder there, and back when the job starts again."""
    path: str | None = Field(None, pattern=r"^/opt/ml/\S+$", description="a path below /opt/ml")
    """The folder in the container; null: /opt/ml/checkpoints."""


class Network(Part):
    """The virtual private cloud, and what may pass."""

    subnets: list[Text] = Field(
        default_factory=list, description="a list of subnet ids", examples=["[subnet-0a1b2c3d]"]
    )
    security_groups: list[Text] = Field(
        default_factory=list, description="a list of security group ids", examples=["[sg-0a1b2c3d]"]
    )
    isolation: bool = Field(False, description="true or false")
    """The container reaches no network at all, not even S3; SageMaker still brings its channels."""
    encrypt_traffic: bool = Field(False, description="true or false")
    """Traffic between hosts is encrypted, which slows distributed training."""


class Profiler(Part):
    """SageMaker Profiler: operators and kernels. AWS ends it on 2027-06-30."""

    cpu_seconds: int = Field(3600, ge=1, description="seconds, from 1", examples=[3600])
    file_rotation_seconds: int = Field(600, ge=1, description="seconds, from 1", examples=[600])


class Profiling(Part):
    """System metrics of the hosts, and SageMaker Profiler. Off unless this section stands in the config."""

    system_interval_ms: Literal[100, 200, 500, 1000, 5000, 60000] | None = Field(
        None, description="100, 200, 500, 1000, 5000 or 60000", examples=[500]
    )
    """Between two samples, in milliseconds; null: SageMaker's own 500."""
    profiler: Profiler | None = Field(None, description="a mapping", examples=["{cpu_seconds: 3600}"])
    rules: dict[str, dict[str, int | float | str]] = Field(
        default_factory=dict,
        description="rules by name, each with its parameters",
        examples=["{ProfilerReport: {CPUBottleneck_threshold: 90}}"],
    )
    """Debugger's profiling rules; each is a processing job beside the training."""
    output: S3Uri | None = Field(
        None, description="an s3:// address; null: the job's output", examples=[A_FOLDER_IN_S3]
    )


class Debugger(Part):
    """Debugger's tensor hook (smdebug in the image). Off unless this section stands in the config."""

    output: S3Uri | None = Field(
        None, description="an s3:// address; null: the job's output", examples=[A_FOLDER_IN_S3]
    )
    hook_parameters: dict[str, str] = Field(default_factory=dict, description="texts by name")
    collections: dict[str, dict[str, str]] = Field(
        default_factory=dict,
        description="collections by name, each with its parameters",
        examples=['{losses: {save_interval: "50"}}'],
    )


class StudySection(Part):
    """The trials of `launcher study`. A run leaves them aside."""

    models: list[Text] = Field(
        default_factory=list, description="a list of timm models' names", examples=["[resnet18, resnet50]"]
    )
    """Empty: the job's own model."""
    loads: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=lambda: [1, 4, 8, 12],
        min_length=1,
        description="a list of whole numbers, 0 or more",
        examples=["[1, 4, 8, 12]"],
    )
    """Augmentation load factors; these are the DALI post's."""
    pipelines: list[Pipeline] = Field(
        default_factory=list,
        description="cpu_reference, cpu, cpu_composed, dali",
        examples=["[cpu_reference, dali]"],
    )
    """Preprocessing pipelines; the others are compared with the first. Empty: all that run on the machine."""
    hosts: list[Annotated[int, Field(ge=1, le=MAX_HOSTS)]] = Field(
        default_factory=lambda: [1, 2, 4, 8],
        min_length=1,
        description=f"a list of whole numbers from 1 to {MAX_HOSTS}",
        examples=["[1, 2, 4, 8]"],
    )
    """Scaling: how many hosts."""
    mode: Literal["strong", "weak", "both"] = Field("both", description="strong, weak or both", examples=["weak"])
    """Scaling: the same global batch at every size (strong), the same batch a process (weak), or both."""
    batches: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="a list of whole numbers, 1 or more", examples=["[16, 32]"]
    )
    """Scaling: images a process, a line of weak scaling each. Empty: what the job's own batch is on its own hosts."""
    steps: int = Field(30, ge=5, le=10000, description="a whole number from 5 to 10000", examples=[30])
    """Scaling: steps of each trial that count, after the warm-up; rounded up to fives, which are measured together."""
    deadline_hours: float | None = Field(None, gt=0, description="hours, above 0", examples=[24])
    """Scaling: how long the whole training may take, all epochs together."""
    budget_usd: float | None = Field(None, gt=0, description="US dollars, above 0", examples=[500])
    """Scaling: what the whole training may cost."""
    repeats: int = Field(3, ge=1, le=100, description="a whole number from 1 to 100", examples=[3])
    """How often each trial is run, in turns with the others."""


class Job(Part):
    """What one config file says.

    >>> job = launcher.load("configs/kt_food_tag.yaml")
    >>> job.compute.instance_type, job.compute.instance_count, job.distribution
    ('ml.p4d.24xlarge', 4, 'smddp')
    """

    name: str = Field(
        pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$",
        max_length=42,
        examples=["kt-food-tag"],
        description="letters, digits and hyphens, 42 characters at most, a letter or digit at both ends",
    )
    """The job's name. A run's name adds 21 characters (time and four letters): SageMaker allows 63 in all."""
    script: str = Field(
        pattern=r"^[A-Za-z0-9._][A-Za-z0-9._+-]*(/[A-Za-z0-9._+-]+)*\.py$",
        max_length=512,
        examples=["train_kd.py"],
        description="a .py file, by its path inside the source folder: letters, digits and . _ + - /",
    )
    """The entry script. Its characters are those of AWS's container toolkit, which refuses other names after the start; torchrun and
    mpirun start Python files only."""
    source: Text | None = Field(
        None, description="a folder on this machine, or null for this kit's entrypoints", examples=["src"]
    )
    """The folder that travels and holds `script`; null: this kit's own entrypoints."""
    role: str | None = Field(
        None,
        pattern=r"^arn:aws[a-z-]*:iam::\d{12}:role/[a-zA-Z_0-9+=,.@/-]+$",
        max_length=2048,
        description="the full ARN of an IAM role",
        examples=["arn:aws:iam::123456789012:role/SageMakerTraining"],
    )
    """What SageMaker may do for the job. A bare role name would need a request to IAM while planning."""
    region: str | None = Field(
        None, pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="an AWS region", examples=["us-west-2"]
    )
    compute: Compute = Field(default_factory=Compute, description="a mapping")
    distribution: Distribution = Field("none", description="smddp, torchrun or none", examples=["torchrun"])
    """How training processes are started: smddp (SageMaker's data parallel library, by mpirun), torchrun, or one plain process."""
    custom_mpi_options: Text | None = Field(
        None, description="options of mpirun", examples=['"-verbose -x NCCL_DEBUG=VERSION"']
    )
    """With smddp: what mpirun gets besides."""
    image: Image | None = Field(
        None,
        description="{framework_version, python} or {uri}",
        examples=['{framework_version: "2.0.0", python: py310}'],
    )
    inputs: dict[str, Input] = Field(
        default_factory=dict, description="channel names, each with folder, file, run, s3, fsx or efs"
    )
    """Data channels by name. The script finds each as SM_CHANNEL_<NAME>."""
    output: S3Uri | None = Field(None, description="an s3:// address", examples=[A_FOLDER_IN_S3])
    """Where SageMaker writes the run's model and output, and this kit what travels: below <output>/<run>/."""
    output_key: Text | None = Field(None, max_length=2048, description="a KMS key's id, ARN or alias")
    """Encrypts what is written to `output`."""
    compress_output: bool = Field(True, description="true or false")
    """false: the model lies in `output` as files instead of model.tar.gz."""
    code: S3Uri | None = Field(None, description="an s3:// address; null: output", examples=[A_FOLDER_IN_S3])
    """Where the source archive is uploaded, below <code>/<run>/."""
    checkpoints: Annotated[
        Checkpoints | None, BeforeValidator(lambda value: {"s3": value} if isinstance(value, str) else value)
    ] = Field(None, description="an s3:// address, or {s3, path}", examples=[A_FOLDER_IN_S3])
    network: Network = Field(default_factory=Network, description="a mapping")
    profiling: Profiling | None = Field(None, description="a mapping", examples=["{system_interval_ms: 500}"])
    debugger: Debugger | None = Field(None, description="a mapping")
    metrics: dict[str, str] | None = Field(
        None, description="regular expressions by name", examples=["{loss: 'loss ([0-9.]+)'}"]
    )
    """What SageMaker reads from the log as metrics; null: the numbers of this kit's metric line."""
    tags: dict[str, str] = Field(default_factory=dict, description="texts by name", examples=["{team: vision}"])
    study: StudySection | None = Field(None, description="a mapping", examples=["{models: [resnet18], loads: [1, 12]}"])
    hyperparameters: dict[str, Any] = Field(default_factory=dict, description="the script's settings")
    """The script's settings, checked against the class that it declares."""
    environment: dict[str, str] = Field(
        default_factory=dict, description="texts by name", examples=['{NCCL_DEBUG: "INFO"}']
    )
    """Environment variables for the script."""

    def __repr__(self) -> str:
        return f"<job {self.name}: {self.script}>"

    def _repr_html_(self) -> str:
        kept = self.model_dump(exclude_defaults=True, exclude_none=True)
        if "environment" in kept:
            kept["environment"] = redact(kept["environment"])
        about = {name: value for name, value in kept.items() if name not in ("name", "hyperparameters")}
        settings = html.more("hyperparameters", html.rows(kept.get("hyperparameters", {})))
        return html.box(f"job {self.name}", "", html.pairs(html.rows(about)) + settings)
