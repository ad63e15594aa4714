"""A ModelTrainer of SDK v3 as a config.

https://sagemaker.readthedocs.io/en/stable/api/generated/sagemaker.train.model_trainer.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launcher.sdk_import.objects import Call, Estimator
from launcher.sdk_import.values import HOUR, MINUTE, Imported, Importer


class TrainerImporter(Importer):
    """Reads ModelTrainer."""

    def read(self, estimator: Estimator) -> Imported:
        """Raises UserError where it starts no script."""
        call = estimator.made
        given = dict(call.keywords)
        code = given.pop("source_code", None)
        entry = code.keywords.get("entry_script") if isinstance(code, Call) else None
        self.script(entry, code.keywords.get("source_dir") if isinstance(code, Call) else None, call)
        self.name(given.pop("base_job_name", None))
        self.region(given.pop("sagemaker_session", None))
        for word, value in (code.keywords if isinstance(code, Call) else {}).items():
            if word not in ("entry_script", "source_dir", "requirements"):
                self.left(f"source_code.{word}", value, "no key of a config")
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
                self.left(name, value, "no key of a config")
        for start in estimator.starts:
            channels = start.argument("input_data_config", 0, channels)
        for channel in channels if isinstance(channels, list) else [] if channels is None else [channels]:
            self._input_data(channel, mode)
        return self.finished()

    def _fields(self, part: Call, keys: Mapping[str, str]) -> None:
        """The fields of one of v3's objects."""
        for word, value in part.keywords.items():
            if word in keys:
                self.put(keys[word], value)
            else:
                self.left(f"{part.short}.{word}", value, "no key of a config")

    def _compute(self, part: Call) -> None:
        keys = {"instance_type": "instance_type", "instance_count": "instance_count", "volume_size_in_gb": "volume_gb"}
        keys |= {
            "volume_kms_key_id": "volume_key",
            "enable_managed_spot_training": "spot",
            "training_plan_arn": "training_plan",
        }
        words = {word: value for word, value in part.keywords.items() if word in keys}
        self._fields(
            Call(part.name, (), words, part.line, part.text), {word: f"compute.{key}" for word, key in keys.items()}
        )
        for word, value in part.keywords.items():
            if word == "keep_alive_period_in_seconds":
                self.seconds("compute.keep_alive_minutes", MINUTE, value)
            elif word == "instance_groups":
                self.groups(value)
            elif word not in keys:
                self.left(f"Compute.{word}", value, "no key of a config")

    def _stopping(self, part: Call) -> None:
        for word, value in part.keywords.items():
            key = {"max_runtime_in_seconds": "max_hours", "max_wait_time_in_seconds": "max_wait_hours"}.get(word)
            if key is None:
                self.left(f"StoppingCondition.{word}", value, "no key of a config")
            else:
                self.seconds(f"compute.{key}", HOUR, value)

    def _networking(self, part: Call) -> None:
        keys = {"subnets": "subnets", "security_group_ids": "security_groups", "enable_network_isolation": "isolation"}
        keys |= {"enable_inter_container_traffic_encryption": "encrypt_traffic"}
        self._fields(part, {word: f"network.{key}" for word, key in keys.items()})

    def _output(self, part: Call) -> None:
        words = dict(part.keywords)
        if words.pop("compression_type", "GZIP") == "NONE":
            self.made.set("compress_output", False)
        self._fields(
            Call(part.name, (), words, part.line, part.text), {"s3_output_path": "output", "kms_key_id": "output_key"}
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
                self.left(f"Torchrun.{word}", value, "no key of a config")

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
            made = self.s3_input(name, Call("TrainingInput", (), kept, given.line, given.text))
        elif isinstance(given, Call) and given.short == "FileSystemDataSource":
            made = self.file_system(name, Call("FileSystemInput", (), given.keywords, given.line, given.text))
        elif isinstance(given, str):
            made = self.address(given) if given.startswith(("s3://", "file://")) else {"folder": given}
        else:
            made = None
            self.left(f"inputs.{name}", given)
        if made is None:
            return
        if isinstance(channel.keywords.get("content_type"), str):
            made["content_type"] = channel.keywords["content_type"]
        if isinstance(mode, str) and mode != "File" and "s3" in made:
            made["mode"] = mode
        self.made.values.setdefault("inputs", {})[name] = made
