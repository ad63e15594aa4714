"""Job: what one config file says, typed and frozen. It touches neither network nor disk."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator

from launcher.config.redaction import mentions_a_secret, redact, redact_setting
from launcher.config.sections import (
    A_FOLDER_IN_S3,
    A_PROFILE_NAME,
    MAX_HOSTS,
    PROFILE_NAME,
    Checkpoints,
    Compute,
    Debugger,
    Image,
    Input,
    InstanceGroup,
    Network,
    Part,
    Profiling,
    S3Uri,
    Secret,
    Text,
)
from launcher.show import html

Distribution = Literal["smddp", "torchrun", "none"]
Pipeline = Literal["cpu_reference", "cpu", "cpu_composed", "dali", "remote"]
"""The values of the setting `preprocessing`; cpu_composed: cpu with compose_augmentation; and remote: cpu on other hosts."""


SCRIPT_PATH = r"^[A-Za-z0-9._][A-Za-z0-9._+-]*(/[A-Za-z0-9._+-]+)*\.py$"
"""A script's path in the source folder."""


def portable_script(path: str) -> str:
    """The path nearest to a .py file's that SCRIPT_PATH accepts.

    >>> portable_script("träin ing.py")
    'train_ing.py'
    """
    plain = unicodedata.normalize("NFKD", path.removesuffix(".py")).encode("ascii", "ignore").decode()
    near = posixpath.normpath(re.sub(r"[^A-Za-z0-9._+/-]+", "_", plain)).strip("/")
    near = re.sub(r"^[+-]+", "", near)
    return f"{near if near.strip('._') else 'train'}.py"


class StudySection(Part):
    """The trials of `launcher study`. Other commands ignore this section."""

    models: list[Text] = Field(
        default_factory=list, description="a list of timm model names", examples=["[resnet18, resnet50]"]
    )
    """Preprocessing: the models to train. Empty: the job's own model."""
    loads: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=lambda: [1, 4, 8, 12],
        min_length=1,
        description="a list of whole numbers, 0 or more",
        examples=["[1, 4, 8, 12]"],
    )
    """Preprocessing: augmentation load factors. The defaults are those of AWS's DALI post."""
    pipelines: list[Pipeline] = Field(
        default_factory=list,
        description="cpu_reference, cpu, cpu_composed, dali, remote",
        examples=["[cpu_reference, dali]"],
    )
    """Preprocessing: the pipelines to compare; the first is the baseline. Empty: all that this machine can run, with remote only if the
    config says which hosts preprocess."""
    serving_groups: list[InstanceGroup] = Field(
        default_factory=list,
        description="a list of {name, instance_type, instance_count}",
        examples=["[{name: cpus, instance_type: ml.c6i.4xlarge, instance_count: 1}]"],
    )
    """Preprocessing: with the pipeline remote, the hosts that preprocess for the hosts of `compute`. Empty: the job's own groups that do
    not train or, without such groups, one ml.c6i.4xlarge."""
    hosts: list[Annotated[int, Field(ge=1, le=MAX_HOSTS)]] = Field(
        default_factory=lambda: [1, 2, 4, 8],
        min_length=1,
        description=f"a list of whole numbers from 1 to {MAX_HOSTS}",
        examples=["[1, 2, 4, 8]"],
    )
    """Scaling: the numbers of hosts."""
    mode: Literal["strong", "weak", "both"] = Field("both", description="strong, weak or both", examples=["weak"])
    """Scaling: keep the global batch fixed (strong), keep the batch per process fixed (weak), or both."""
    batches: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="a list of whole numbers, 1 or more", examples=["[16, 32]"]
    )
    """Scaling: images per process, each with its own weak-scaling curve. Empty: the job's global batch divided among its processes."""
    steps: int = Field(30, ge=5, le=10000, description="a whole number from 5 to 10000", examples=[30])
    """Scaling: measured steps of each trial, after the warm-up. Rounded up to a multiple of 5, since 5 steps are measured together."""
    deadline_hours: float | None = Field(None, gt=0, description="hours, above 0", examples=[24])
    """Scaling: hours that the whole training may take."""
    budget_usd: float | None = Field(None, gt=0, description="US dollars, above 0", examples=[500])
    """Scaling: US dollars that the whole training may cost."""
    repeats: int = Field(3, ge=1, le=100, description="a whole number from 1 to 100", examples=[3])
    """How often each trial runs, interleaved with the others."""


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
    """The job's name. A run's name adds 21 characters (time and four letters); SageMaker allows 63."""
    script: str = Field(
        pattern=SCRIPT_PATH,
        max_length=512,
        examples=["train_kd.py"],
        description="a .py file's path inside the source folder: letters, digits and . _ + - /",
    )
    """The entry script. AWS's container toolkit refuses other characters, but only after the hosts have started. torchrun and mpirun start
    Python files only."""
    source: Text | None = Field(None, description="a folder on this machine", examples=["src"])
    """The folder that holds `script`, packaged for the hosts. null: this kit's entrypoints."""
    profile: str | None = Field(
        None,
        pattern=PROFILE_NAME,
        description=f"a profile's name: {A_PROFILE_NAME}",
        examples=["production"],
    )
    """The profile of your defaults to apply as well: see `launcher defaults`."""
    role: str | None = Field(
        None,
        pattern=r"^arn:aws[a-z-]*:iam::\d{12}:role/[a-zA-Z_0-9+=,.@/-]+$",
        max_length=2048,
        description="the full ARN of an IAM role",
        examples=["arn:aws:iam::123456789012:role/SageMakerTraining"],
    )
    """The role that SageMaker assumes for the job. Give the full ARN: a plan does not query IAM."""
    region: str | None = Field(
        None, pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d$", description="an AWS region", examples=["us-west-2"]
    )
    """The region of the job and its buckets."""
    compute: Compute = Field(default_factory=Compute, description="a mapping")
    """The hosts: how many, of which type, and for how long."""
    distribution: Distribution = Field("none", description="smddp, torchrun or none", examples=["torchrun"])
    """What starts the training processes: mpirun with SageMaker's data parallel library (smddp), torchrun, or nothing, for one process."""
    custom_mpi_options: Text | None = Field(
        None, description="mpirun options", examples=['"-verbose -x NCCL_DEBUG=VERSION"']
    )
    """With smddp: further options for mpirun."""
    image: Image | None = Field(
        None,
        description="{framework_version, python} or {uri}",
        examples=['{framework_version: "2.14.0", python: py312}'],
    )
    """The container image."""
    inputs: dict[str, Input] = Field(
        default_factory=dict, description="channel names, each with folder, file, run, s3, fsx or efs"
    )
    """Data channels by name. The script finds each in SM_CHANNEL_<NAME>."""
    output: S3Uri | None = Field(None, description="an s3:// address", examples=[A_FOLDER_IN_S3])
    """Where a run on SageMaker writes its model and output, and where its source and data are uploaded: below <output>/<run>/."""
    output_key: Text | None = Field(None, max_length=2048, description="a KMS key's id, ARN or alias")
    """Encrypts what is written to `output`."""
    compress_output: bool = Field(True, description="true or false")
    """Write the model to `output` as model.tar.gz; false: as files."""
    code: S3Uri | None = Field(None, description="an s3:// address", examples=[A_FOLDER_IN_S3])
    """Where the source package is uploaded, below <code>/<run>/. null: output."""
    checkpoints: Annotated[
        Checkpoints | None, BeforeValidator(lambda value: {"s3": value} if isinstance(value, str) else value)
    ] = Field(None, description="an s3:// address, or {s3, path}", examples=[A_FOLDER_IN_S3])
    """Where the script's checkpoints are kept. null: they are lost when a job on SageMaker ends."""
    network: Network = Field(default_factory=Network, description="a mapping")
    """The hosts' network on SageMaker."""
    observe: bool = Field(True, description="true or false")
    """Measure the steps, data loading and machine of your own script, without changing it. This kit's scripts measure themselves."""
    profiling: Profiling | None = Field(None, description="a mapping", examples=["{system_interval_ms: 500}"])
    """System metrics and SageMaker Profiler."""
    debugger: Debugger | None = Field(None, description="a mapping")
    """Debugger's tensor hook."""
    metrics: dict[str, str] | None = Field(
        None, description="regular expressions by name", examples=["{loss: 'loss ([0-9.]+)'}"]
    )
    """Metrics that SageMaker reads from the log, each by a regular expression. null: those of this kit's metric line."""
    tags: dict[str, str] = Field(default_factory=dict, description="strings by name", examples=["{team: vision}"])
    """Tags of the training job."""
    study: StudySection | None = Field(None, description="a mapping", examples=["{models: [resnet18], loads: [1, 12]}"])
    """The trials of `launcher study`."""
    hyperparameters: dict[str, Any] = Field(default_factory=dict, description="settings by name")
    """The script's settings, checked against its settings class."""
    environment: dict[str, str] = Field(
        default_factory=dict, description="strings by name", examples=['{NCCL_DEBUG: "INFO"}']
    )
    """Environment variables of the script. Secrets belong under `secrets`."""
    secrets: dict[str, Secret] = Field(
        default_factory=dict,
        description="names of variables, each env or {secretsmanager, key}",
        examples=["{WANDB_API_KEY: env, HF_TOKEN: {secretsmanager: team/hugging-face}}"],
    )
    """Environment variables of the script whose values no config, plan, record or request holds."""

    _defaults: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("script", mode="before")
    @classmethod
    def _with_a_name_to_take(cls, value: Any) -> Any:
        """Suggest a name near a .py file's own. The pattern refuses other programs, which no other name would fix."""
        if not isinstance(value, str) or not value.endswith(".py") or re.search(SCRIPT_PATH, value):
            return value
        shown = "a path" if mentions_a_secret(value) else repr(value[:60]).replace(": ", ":")
        if posixpath.isabs(value):
            name = portable_script(posixpath.basename(value))
            found, fix = "begins at /, not in the source folder", f"write its folder as source, and script: {name}"
        else:
            found = "has other characters than letters, digits and . _ + - /"
            fix = f"rename the file, and write script: {portable_script(value)}"
        raise ValueError(f"{shown} {found}: {fix}")

    @property
    def defaults(self) -> Mapping[str, str]:
        """Dotted key -> file and line, for the values that came from defaults (`launcher.config.defaults`)."""
        return self._defaults

    def with_defaults(self, origins: Mapping[str, str]) -> Job:
        """The same job, knowing which values came from defaults."""
        made = self.model_copy()
        made._defaults = dict(origins)
        return made

    @property
    def written_to(self) -> dict[str, str]:
        """S3 addresses by key: those that the job writes to, except `checkpoints`, and that of its code."""
        places = {"output": self.output, "code": self.code}
        places["profiling.output"] = self.profiling.output if self.profiling is not None else None
        places["debugger.output"] = self.debugger.output if self.debugger is not None else None
        return {key: uri for key, uri in places.items() if uri is not None}

    def with_whole_paths(self, values: dict[str, Any]) -> dict[str, Any]:
        """The job's `values`, as `model_dump` and `redacted` give them, with the full path of each input's folder or file: a relative one
        would name other data elsewhere."""
        for channel, given in self.inputs.items():
            if given.place is not None:
                values["inputs"][channel][given.source] = str(given.place)
        return values

    def __repr__(self) -> str:
        return f"<job {self.name}: {self.script}>"

    def redacted(self, **options: Any) -> dict[str, Any]:
        """The job as it is recorded and printed: REDACTED stands for what seems to be a secret. Options are those of `model_dump`."""
        kept = self.model_dump(**{"exclude_none": True, **options})
        for name in kept.keys() - {"secrets", "environment", "metrics"}:
            kept[name] = redact_setting(name, kept[name])
        if "environment" in kept:
            kept["environment"] = redact(self.environment)
        if kept.get("metrics"):  # their names are not those of settings
            kept["metrics"] = {name: redact_setting("", regex) for name, regex in kept["metrics"].items()}
        return kept

    def _repr_html_(self) -> str:
        kept = self.redacted(exclude_defaults=True)
        about = {name: value for name, value in kept.items() if name not in ("name", "hyperparameters")}
        settings = html.more("hyperparameters", html.rows(kept.get("hyperparameters", {})))
        return html.box(f"job {self.name}", "", html.pairs(html.rows(about)) + settings)
