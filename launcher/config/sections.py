"""The sections of a config: compute, image, inputs, secrets, checkpoints, network, profiling, debugger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_serializer, model_validator

Text = Annotated[str, StringConstraints(min_length=1)]
S3Uri = Annotated[str, StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$", max_length=1024)]
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html"""
INSTANCE_TYPE = r"^ml\.[a-z0-9-]+\.[a-z0-9]+$"
InstanceType = Annotated[str, StringConstraints(pattern=INSTANCE_TYPE)]

MAX_HOSTS = 1000
"""Above any quota of SageMaker's, so that more is a typing mistake."""

A_FOLDER_IN_S3 = "s3://bucket/prefix"


PROFILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
A_PROFILE_NAME = "letters, digits, hyphens and underscores, 64 at most"


class Part(BaseModel):
    """A section of a job: frozen, with no unknown keys and no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class InstanceGroup(Part):
    """Hosts of one type in a cluster of several types."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        description="letters, digits, dots, hyphens and underscores, 64 at most",
        examples=["gpus"],
    )
    """The group's name, for training_groups and inputs."""
    instance_type: InstanceType = Field(description="a SageMaker instance type, ml. first", examples=["ml.g5.xlarge"])
    """The group's hosts."""
    instance_count: int = Field(ge=1, le=MAX_HOSTS, description=f"a whole number from 1 to {MAX_HOSTS}", examples=[2])
    """The number of hosts in the group."""


class Compute(Part):
    """The hosts: how many, of which type, and for how long."""

    instance_type: InstanceType | None = Field(
        None, description="a SageMaker instance type, ml. first", examples=["ml.g5.xlarge"]
    )
    """The type of each host on SageMaker. Runs on this machine ignore it."""
    instance_count: int = Field(
        1, ge=1, le=MAX_HOSTS, description=f"a whole number from 1 to {MAX_HOSTS}", examples=[2]
    )
    """The number of hosts. On this machine each is a process tree with its own loopback address."""
    instance_groups: list[InstanceGroup] = Field(
        default_factory=list,
        description="a list of {name, instance_type, instance_count}",
        examples=["[{name: gpus, instance_type: ml.p4d.24xlarge, instance_count: 2}]"],
    )
    """Hosts of several types, instead of instance_type and instance_count. Runs on this machine ignore their types."""
    training_groups: list[Text] = Field(
        default_factory=list, description="names of instance groups", examples=["[gpus]"]
    )
    """The instance groups that `distribution` spreads training over. The script also starts on the hosts of the other groups: with this
    kit's scripts and `worker_type: remote` they preprocess."""
    processes_per_host: int | None = Field(
        None, ge=1, le=1024, description="a whole number from 1 to 1024, or null", examples=[2]
    )
    """Training processes on each host of this machine. null: one per GPU, or one without GPUs. On SageMaker it applies with torchrun, with
    at most one per GPU."""
    volume_gb: int = Field(30, ge=1, le=16384, description="GB, a whole number from 1 to 16384", examples=[500])
    """Disk of each host in GB, for data, code, model and checkpoints. 30 is the default of SageMaker's SDK. An EBS volume has at most
    16 TiB: https://docs.aws.amazon.com/ebs/latest/userguide/volume_constraints.html"""
    shm_gb: float | None = Field(None, gt=0, le=4096, description="GB, above 0 and at most 4096", examples=[8])
    """Shared memory (/dev/shm) of each host in GB, for the docker backend. null: half of this machine's memory, divided among the
    hosts."""
    memory_gb: float | None = Field(None, gt=0, le=32768, description="GB, above 0 and at most 32768", examples=[16])
    """Memory of each host in GB, /dev/shm included, for the docker backend. The engine kills a host that exceeds it. null: nine tenths of
    this machine's memory, divided among the hosts."""
    max_hours: float = Field(24.0, gt=0, le=28 * 24, description="hours, above 0 and at most 672", examples=[1.5])
    """Stop the run after this many hours. SageMaker allows 672 (28 days, MaxRuntimeInSeconds)."""
    spot: bool = Field(False, description="true or false")
    """Use spare capacity at a lower price. SageMaker may interrupt the job and start it again."""
    max_wait_hours: float | None = Field(
        None, gt=0, le=28 * 24, description="hours, at least max_hours and at most 672", examples=[48]
    )
    """With spot: hours that waiting and training may take together. null: twice max_hours, at most 672."""
    keep_alive_minutes: float | None = Field(
        None, gt=0, le=360, description="minutes, above 0 and at most 360", examples=[30]
    )
    """Warm pool: keep the hosts, and pay for them, for this many minutes after the job, so that a similar job starts at once. 360 is the
    maximum of KeepAlivePeriodInSeconds in botocore 1.44."""
    max_attempts: int | None = Field(None, ge=1, le=30, description="a whole number from 1 to 30", examples=[3])
    """How often SageMaker tries the job again after an internal server error."""
    training_plan: Text | None = Field(None, description="the ARN of a training plan")
    """Run on capacity that a SageMaker training plan reserved."""
    volume_key: Text | None = Field(None, max_length=2048, description="a KMS key's id, ARN or alias")
    """Encrypts the hosts' disks."""
    price_per_hour: float | None = Field(None, gt=0, description="US dollars, above 0", examples=[32.77])
    """What you pay per instance-hour, in US dollars. null: AWS's list price, which `launcher plan --check` updates."""


class Image(Part):
    """The container image: one of AWS's by PyTorch and Python version, or any image by its address."""

    framework_version: str | None = Field(
        None,
        pattern=r"^\d{1,3}(\.\d{1,3}){1,2}$",
        description="a PyTorch version of two or three numbers, in quotes",
        examples=['"2.14.0"'],
    )
    """The PyTorch version of AWS's image."""
    python: str | None = Field(
        None, pattern=r"^py[23]\d{0,2}$", description="py and a Python version without its dot", examples=["py312"]
    )
    """The Python version of AWS's image."""
    uri: str | None = Field(
        None, pattern=r"^\S{1,255}$", description="an image's address in a registry, at most 255 characters"
    )
    """An image of your own, instead of framework_version and python."""

    @model_validator(mode="after")
    def _one_way(self) -> Image:
        if (self.uri is None) == (self.framework_version is None and self.python is None):
            found = "nothing given" if self.uri is None else "uri and a version given"
            raise ValueError(f"{found}: give either uri, or framework_version and python")
        if self.uri is None and (self.framework_version is None or self.python is None):
            given, lacking = sorted(("framework_version", "python"), key=lambda name: getattr(self, name) is None)
            raise ValueError(f"{given} without {lacking}: add {lacking}")
        return self


class Input(Part):
    """One data channel: exactly one of folder, file, run, s3, fsx and efs, and how its data reach the hosts."""

    SOURCES: ClassVar[tuple[str, ...]] = ("folder", "file", "run", "s3", "fsx", "efs")

    folder: Text | None = Field(None, description="a folder on this machine", examples=["data/digits/train"])
    """A folder, relative to the current one. Runs on this machine read it in place; for SageMaker it is uploaded below `output`."""
    file: Text | None = Field(None, description="a file on this machine", examples=["teacher/model.safetensors"])
    """A file, which the channel holds under its own name."""
    run: Text | None = Field(None, description="a run's name, or a job's name", examples=["quickstart-teacher"])
    """An earlier run, or a job's latest completed run. The channel holds its model.tar.gz."""
    student: str | None = Field(
        None, pattern=r"^[a-z][a-z0-9_]{0,31}$", description="a student's name", examples=["tiny"]
    )
    """With run: one of the students that it trained. The channel holds the content of its folder."""
    s3: S3Uri | None = Field(None, description="an s3:// address", examples=[A_FOLDER_IN_S3])
    """Everything below a prefix in S3, or a manifest."""
    fsx: str | None = Field(
        None,
        pattern=r"^fs-[0-9a-f]{8,18}$",
        description="a file system's id",
        examples=["fs-0123456789abcdef0"],
    )
    """An FSx for Lustre file system."""
    efs: str | None = Field(
        None,
        pattern=r"^fs-[0-9a-f]{8,18}$",
        description="a file system's id",
        examples=["fs-0123456789abcdef0"],
    )
    """An EFS file system."""
    path: str | None = Field(None, pattern=r"^/\S*$", description="an absolute path", examples=["/fsx/food/train"])
    """With fsx or efs: the folder there. An FSx path begins with the file system's mount name."""
    access: Literal["ro", "rw"] | None = Field(None, description="ro or rw", examples=["ro"])
    """With fsx or efs: read only (ro) or read and write (rw). null: ro."""
    mode: Literal["File", "FastFile", "Pipe"] | None = Field(
        None, description="File, FastFile or Pipe", examples=["FastFile"]
    )
    """How data in S3 reach the hosts. File copies them to disk before the script starts. FastFile streams each file when it is read. Pipe
    streams through a named pipe. null: File."""
    sharded: bool | None = Field(None, description="true or false")
    """With S3: each host gets a share of the objects instead of all (ShardedByS3Key). null: false."""
    data_type: Literal["S3Prefix", "ManifestFile", "AugmentedManifestFile"] | None = Field(
        None, description="S3Prefix, ManifestFile or AugmentedManifestFile", examples=["ManifestFile"]
    )
    """What `s3` names. null: S3Prefix."""
    attributes: list[Text] | None = Field(None, description="a list of names", examples=["[source-ref, class]"])
    """With an AugmentedManifestFile: the attributes that the script gets."""
    shuffle_seed: int | None = Field(None, description="a whole number", examples=[1])
    """With S3: shuffle the order of the objects with this seed; in Pipe mode again for each epoch."""
    content_type: Text | None = Field(
        None, max_length=256, description="a media type", examples=["application/x-image"]
    )
    """The media type of the data."""
    compression: Literal["None", "Gzip"] | None = Field(None, description="None or Gzip", examples=["Gzip"])
    """With S3 and Pipe mode: how the objects are compressed."""
    record_wrapper: Literal["None", "RecordIO"] | None = Field(
        None, description="None or RecordIO", examples=["RecordIO"]
    )
    """With S3: wrap each object in a RecordIO record."""
    instance_groups: list[Text] | None = Field(None, description="names of instance groups", examples=["[gpus]"])
    """The instance groups that get this channel. null: all."""

    @property
    def source(self) -> str:
        """Which of SOURCES is given."""
        return next(name for name in self.SOURCES if getattr(self, name) is not None)

    @property
    def place(self) -> Path | None:
        """The whole path of the folder or file on this machine; None: it is none."""
        given = self.folder or self.file
        return None if given is None else Path(os.path.expanduser(given)).absolute()

    @model_validator(mode="after")
    def _exactly_one(self) -> Input:
        given = [name for name in self.SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} given" if given else f"none of {', '.join(self.SOURCES)} given"
            raise ValueError(f"{found}: give exactly one")
        on_file_system = given[0] in ("fsx", "efs")
        for_s3 = ("mode", "sharded", "data_type", "attributes", "shuffle_seed", "compression", "record_wrapper")
        wrong = [
            name
            for name in (*for_s3, "instance_groups") * on_file_system + ("path", "access") * (not on_file_system)
            if getattr(self, name) is not None
        ]
        if wrong:
            belongs = "data in S3" if on_file_system else "fsx and efs"
            names = ", ".join(wrong)
            raise ValueError(f"{names} with {given[0]}, but only {belongs} can have it: remove {names}")
        if self.student is not None and self.run is None:
            raise ValueError("student without run: name the run that trained it")
        if on_file_system and self.path is None:
            raise ValueError(f"{given[0]} without path: name a folder of the file system")
        return self


class Secret(Part):
    """Where a secret's value comes from when a run starts: `env`, the environment of whoever starts it, or AWS Secrets Manager."""

    secretsmanager: str | None = Field(
        description="a secret's name or ARN: letters, digits and / _ + = . @ - :",
        pattern=r"^[A-Za-z0-9/_+=.@:-]+$",
        max_length=2048,
        examples=["team/hugging-face"],
    )
    """A secret in AWS Secrets Manager. On SageMaker the job's role reads it; on this machine your own credentials do.
    https://docs.aws.amazon.com/secretsmanager/latest/apireference/API_CreateSecret.html"""
    key: str | None = Field(
        None,
        description="a field's name, without line breaks and control characters",
        pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$",
        examples=["token"],
    )
    """If the secret is a JSON object: the field that holds the value. null: the secret's whole text."""

    @model_validator(mode="before")
    @classmethod
    def _where(cls, given: Any) -> Any:
        if given == "env":
            return {"secretsmanager": None}
        if isinstance(given, dict) and "secretsmanager" in given and given["secretsmanager"] is None:
            raise ValueError("secretsmanager without a name: name the secret, or write env instead of the mapping")
        if not isinstance(given, (dict, cls)):
            raise ValueError(
                "neither env nor a mapping: write env, or {secretsmanager: NAME}; a config never holds the value itself"
            )
        return given

    @model_serializer
    def _as_written(self) -> str | dict[str, str]:
        if self.secretsmanager is None:
            return "env"
        return {"secretsmanager": self.secretsmanager, **({"key": self.key} if self.key is not None else {})}

    def __str__(self) -> str:
        if self.secretsmanager is None:
            return "from the environment"
        return f"{self.secretsmanager}{f' ({self.key})' if self.key else ''} of AWS Secrets Manager"


class Checkpoints(Part):
    """Where the script's checkpoints are kept."""

    s3: S3Uri = Field(description="an s3:// address", examples=[A_FOLDER_IN_S3])
    """SageMaker copies the checkpoint folder there while the job runs, and back when the job starts again."""
    path: str | None = Field(None, pattern=r"^/opt/ml/\S+$", description="a path below /opt/ml")
    """The checkpoint folder in the container. null: /opt/ml/checkpoints."""


class Network(Part):
    """The hosts' network on SageMaker."""

    subnets: list[Text] = Field(
        default_factory=list, description="a list of subnet ids", examples=["[subnet-0a1b2c3d]"]
    )
    """Run in these subnets of your VPC."""
    security_groups: list[Text] = Field(
        default_factory=list, description="a list of security group ids", examples=["[sg-0a1b2c3d]"]
    )
    """The security groups of the hosts."""
    isolation: bool = Field(False, description="true or false")
    """Cut the container off from every network, S3 included. SageMaker still provides its channels."""
    encrypt_traffic: bool = Field(False, description="true or false")
    """Encrypt traffic between hosts, which slows distributed training."""


class Profiler(Part):
    """SageMaker Profiler, which measures operators and kernels. AWS ends it on 2027-06-30."""

    cpu_seconds: int = Field(3600, ge=1, description="seconds, 1 or more", examples=[3600])
    """How long CPU activity is profiled, in seconds."""
    file_rotation_seconds: int = Field(600, ge=1, description="seconds, 1 or more", examples=[600])
    """How often the profiler starts a new file, in seconds."""


class Profiling(Part):
    """System metrics and SageMaker Profiler, on SageMaker. Without this section both are off."""

    system_interval_ms: Literal[100, 200, 500, 1000, 5000, 60000] | None = Field(
        None, description="milliseconds: 100, 200, 500, 1000, 5000 or 60000", examples=[500]
    )
    """Milliseconds between two samples of the system metrics. null: 500, SageMaker's default.
    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ProfilerConfig.html"""
    profiler: Profiler | None = Field(None, description="a mapping", examples=["{cpu_seconds: 3600}"])
    """Turns SageMaker Profiler on."""
    rules: dict[str, dict[str, int | float | str]] = Field(
        default_factory=dict,
        description="rules by name, each with its parameters",
        examples=["{ProfilerReport: {CPUBottleneck_threshold: 90}}"],
    )
    """Debugger's profiling rules. Each is a processing job beside the training."""
    output: S3Uri | None = Field(
        None, description="an s3:// address; null: the job's output", examples=[A_FOLDER_IN_S3]
    )


class Debugger(Part):
    """Debugger's tensor hook (smdebug in the image). Without this section it is off."""

    output: S3Uri | None = Field(
        None, description="an s3:// address; null: the job's output", examples=[A_FOLDER_IN_S3]
    )
    hook_parameters: dict[str, str] = Field(default_factory=dict, description="strings by name")
    """The hook's parameters (HookParameters)."""
    collections: dict[str, dict[str, str]] = Field(
        default_factory=dict,
        description="collections by name, each with its parameters",
        examples=['{losses: {save_interval: "50"}}'],
    )
    """The tensor collections to save (CollectionConfigurations)."""
