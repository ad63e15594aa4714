"""A ModelTrainer of SDK v3 as a config.

https://sagemaker.readthedocs.io/en/stable/api/generated/sagemaker.train.model_trainer.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.sdk_import.importer import HOUR, MINUTE, NO_KEY, Imported, Importer
from launcher.sdk_import.objects import Call, Estimator, is_plain

DEFAULT_MAX_HOURS = 1
"""DEFAULT_MAX_RUNTIME_IN_SECONDS of 3.27.0, for a trainer whose stopping condition names no run time."""


class TrainerImporter(Importer):
    """Reads ModelTrainer."""

    def read(self, estimator: Estimator) -> Imported:
        """Raises UserError if it starts no script."""
        call = estimator.made
        given = dict(call.keywords)
        code = given.pop("source_code", None)
        entry = code.keywords.get("entry_script") if isinstance(code, Call) else None
        self.script(entry, code.keywords.get("source_dir") if isinstance(code, Call) else None, call)
        self.name(given.pop("base_job_name", None))
        self.region(given.pop("sagemaker_session", None))
        for word, value in (code.keywords if isinstance(code, Call) else {}).items():
            usual = word == "requirements" and value == "requirements.txt"  # which SageMaker's images install unasked
            if word not in ("entry_script", "source_dir") and not usual:
                self.left(f"source_code.{word}", value, NO_KEY)
        parts: dict[str, Callable[[Call], None]] = {
            "compute": self._compute,
            "stopping_condition": self._stopping,
            "networking": self._networking,
            "output_data_config": self._output,
            "checkpoint_config": lambda part: self._fields(
                part, {"s3_uri": "checkpoints.s3", "local_path": "checkpoints.path"}
            ),
            "distributed": self._distributed,
        }
        plain = {"training_image": "image.uri", "role": "role"}
        channels = given.pop("input_data_config", None)
        mode = given.pop("training_input_mode", None)
        for change in estimator.changes:
            if change.certain and change.name == "with_checkpoint_config" and "checkpoint_config" not in given:
                given["checkpoint_config"] = change.argument("checkpoint_config", 0)
            else:
                self.left(change.name, change)
        given = {name: value for name, value in given.items() if value is not None}
        if "stopping_condition" not in given:
            self.made.set("compute.max_hours", DEFAULT_MAX_HOURS)
        if "compute" not in given:
            self.made.set("compute.instance_type", "ml.m5.xlarge")  # DEFAULT_INSTANCE_TYPE
        for name, value in given.items():
            if name in parts and isinstance(value, Call):
                parts[name](value)
            elif name in plain:
                self.put(plain[name], value)
            elif name == "hyperparameters":
                self.settings(self.mapping(name, value))
            elif name == "environment":
                self.environment(value)
            elif name == "tags":
                self._tags_of_v3(value)
            else:
                self.left(name, value, NO_KEY)
        start = self.start(estimator)
        more = start.argument("input_data_config", 0) if start is not None else None
        for channel in (
            one for some in (channels, more) if some is not None for one in (some if isinstance(some, list) else [some])
        ):
            self._input_data(channel, mode)  # as in the SDK, the later of two with one name counts
        return self.finished()

    def _fields(self, part: Call, keys: Mapping[str, str]) -> None:
        """The fields of one of v3's objects."""
        for word, value in part.keywords.items():
            if word in keys:
                self.put(keys[word], value)
            else:
                self.left(f"{part.short}.{word}", value, NO_KEY)

    def _compute(self, part: Call) -> None:
        keys = {"instance_type": "instance_type", "instance_count": "instance_count", "volume_size_in_gb": "volume_gb"}
        keys |= {
            "volume_kms_key_id": "volume_key",
            "enable_managed_spot_training": "spot",
            "training_plan_arn": "training_plan",
        }
        words = {word: value for word, value in part.keywords.items() if word in keys}
        self._fields(
            Call(part.name, [], words, part.line, part.text), {word: f"compute.{key}" for word, key in keys.items()}
        )
        for word, value in part.keywords.items():
            if word == "keep_alive_period_in_seconds":
                self.seconds("compute.keep_alive_minutes", MINUTE, value)
            elif word == "instance_groups":
                self.groups(value)
            elif word not in keys:
                self.left(f"Compute.{word}", value, NO_KEY)

    def _stopping(self, part: Call) -> None:
        for word, value in part.keywords.items():
            key = {"max_runtime_in_seconds": "max_hours", "max_wait_time_in_seconds": "max_wait_hours"}.get(word)
            if key is None:
                self.left(f"StoppingCondition.{word}", value, NO_KEY)
            else:
                self.seconds(f"compute.{key}", HOUR, value)
        unread = any(word.startswith("**") for word in part.keywords)  # it may be among those
        if part.keywords.get("max_runtime_in_seconds") is None and not unread:
            self.made.set("compute.max_hours", DEFAULT_MAX_HOURS)

    def _networking(self, part: Call) -> None:
        keys = {"subnets": "subnets", "security_group_ids": "security_groups", "enable_network_isolation": "isolation"}
        keys |= {"enable_inter_container_traffic_encryption": "encrypt_traffic"}
        self._fields(part, {word: f"network.{key}" for word, key in keys.items()})

    def _output(self, part: Call) -> None:
        words = dict(part.keywords)
        compression = words.pop("compression_type", "GZIP")
        if not is_plain(compression):
            self.left("compress_output", compression)
        elif compression == "NONE":
            self.made.set("compress_output", False)
        self._fields(
            Call(part.name, [], words, part.line, part.text), {"s3_output_path": "output", "kms_key_id": "output_key"}
        )

    def _distributed(self, part: Call) -> None:
        if part.short != "Torchrun":
            self.left("distribution", part, "this kit starts torchrun or smddp")
            return
        self.made.values["distribution"] = "torchrun"
        for word, value in part.keywords.items():
            if word == "process_count_per_node":
                self.put("compute.processes_per_host", value)
            else:
                self.left(f"Torchrun.{word}", value, NO_KEY)

    def _tags_of_v3(self, tags: Any) -> None:
        for tag in tags if isinstance(tags, list) else [tags]:
            key, value = (tag.keywords.get(word) if isinstance(tag, Call) else None for word in ("key", "value"))
            if isinstance(key, str) and isinstance(value, str):
                self.tag(key, value)
            else:
                self.left("tags", tag)

    def _input_data(self, channel: Any, mode: Any) -> None:
        name = channel.argument("channel_name", 0) if isinstance(channel, Call) else None
        if not isinstance(name, str):
            self.left("inputs", channel)
            return
        given = channel.argument("data_source", 1)
        if isinstance(given, Call) and given.short == "S3DataSource":
            words = {"s3_uri": "s3_data", "s3_data_type": "s3_data_type", "s3_data_distribution_type": "distribution"}
            words |= {"attribute_names": "attribute_names", "instance_group_names": "instance_groups"}
            kept = {words.get(word, word): value for word, value in given.keywords.items()}
            made = self.s3_input(name, Call("TrainingInput", [], kept, given.line, given.text))
        elif isinstance(given, Call) and given.short == "FileSystemDataSource":
            made = self.file_system(name, Call("FileSystemInput", [], given.keywords, given.line, given.text))
        elif isinstance(given, str):
            made = (
                self.address(given) if given.startswith(("s3://", "file://")) else {"folder": self.source.path(given)}
            )
        else:
            made = None
            self.left(f"inputs.{name}", given)
        if made is None:
            return
        for word, value in channel.keywords.items():
            if word == "content_type":
                made["content_type"] = value
            elif word not in ("channel_name", "data_source"):
                self.left(f"inputs.{name}.{word}", value, NO_KEY)
        if isinstance(mode, str) and mode != "File" and not {"fsx", "efs"} & made.keys():
            made["mode"] = mode
        self.made.values.setdefault("inputs", {})[name] = made
