"""An estimator of SDK v2 as a config.

https://sagemaker.readthedocs.io/en/v2/frameworks/pytorch/sagemaker.pytorch.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.sdk_import.importer import HOUR, MINUTE, NO_KEY, Imported, Importer
from launcher.sdk_import.objects import Call, Estimator, Unread, is_plain

PLAIN = {
    "role": "role",
    "instance_type": "compute.instance_type",
    "instance_count": "compute.instance_count",
    "volume_size": "compute.volume_gb",
    "volume_kms_key": "compute.volume_key",
    "use_spot_instances": "compute.spot",
    "max_retry_attempts": "compute.max_attempts",
    "training_plan": "compute.training_plan",
    "output_path": "output",
    "output_kms_key": "output_key",
    "code_location": "code",
    "subnets": "network.subnets",
    "security_group_ids": "network.security_groups",
    "enable_network_isolation": "network.isolation",
    "encrypt_inter_container_traffic": "network.encrypt_traffic",
    "image_uri": "image.uri",
    "checkpoint_s3_uri": "checkpoints.s3",
    "checkpoint_local_path": "checkpoints.path",
    # SDK v1's names
    "train_instance_type": "compute.instance_type",
    "train_instance_count": "compute.instance_count",
    "train_volume_size": "compute.volume_gb",
    "train_use_spot_instances": "compute.spot",
    "image_name": "image.uri",
    "image": "image.uri",
}
"""Argument of SDK v2's estimators -> key of a config, for those that take the same value in both."""

UNITS = {
    "max_run": ("compute.max_hours", HOUR),
    "train_max_run": ("compute.max_hours", HOUR),
    "max_wait": ("compute.max_wait_hours", HOUR),
    "train_max_wait": ("compute.max_wait_hours", HOUR),
    "keep_alive_period_in_seconds": ("compute.keep_alive_minutes", MINUTE),
}
"""Argument in seconds -> key, and its seconds."""

OF_PROFILER_CONFIG = (
    "s3_output_path",
    "system_monitor_interval_millis",
    "framework_profile_params",
    "profile_params",
    "disable_profiler",
)
"""Positional arguments of the SDK's ProfilerConfig, in their order."""

OF_DEBUGGER_HOOK = ("s3_output_path", "container_local_output_path", "hook_parameters", "collection_configs")
"""The same of its DebuggerHookConfig."""

HANDLED = {
    "base_job_name",
    "container_log_level",
    "debugger_hook_config",
    "disable_output_compression",
    "disable_profiler",
    "distribution",
    "distributions",
    "enable_sagemaker_metrics",
    "entry_point",
    "environment",
    "framework_version",
    "hyperparameters",
    "input_mode",
    "inputs",
    "instance_groups",
    "job_name",
    "logs",
    "metric_definitions",
    "profiler_config",
    "py_version",
    "pytorch_version",
    "rules",
    "sagemaker_session",
    "source_dir",
    "tags",
    "transformers_version",
    "wait",
}
"""Arguments that the importer reads one by one, or that change nothing of the job."""

POSITIONAL = {
    "PyTorch": "entry_point framework_version py_version source_dir hyperparameters image_uri distribution compiler_config",
    "HuggingFace": "py_version entry_point transformers_version tensorflow_version pytorch_version source_dir hyperparameters image_uri",
    "Estimator": "image_uri role instance_count instance_type keep_alive_period_in_seconds volume_size volume_kms_key max_run input_mode",
}
"""The first arguments of each class, by their place in 2.257.7."""

CLOSED = "SageMaker's Debugger and its system metrics, which the SDK turns on by default, stay off: AWS has closed them to new customers"


class EstimatorImporter(Importer):
    """Reads PyTorch, HuggingFace and Estimator."""

    def read(self, estimator: Estimator) -> Imported:
        """Raises UserError if it starts no script."""
        call = estimator.made
        names = POSITIONAL[call.short].split()
        names += [f"argument {place}" for place in range(len(names) + 1, len(call.positional) + 1)]
        given = {**dict(zip(names, call.positional)), **call.keywords}
        self.script(given.get("entry_point"), given.get("source_dir"), call)
        self.name(given.get("base_job_name"))
        self.region(given.get("sagemaker_session"))
        self._image(call.short, given)
        for name, value in given.items():
            if name in PLAIN:
                self.put(PLAIN[name], value)
            elif name in UNITS:
                self.seconds(*UNITS[name], value)
            elif name not in HANDLED and value is not None and value is not False:
                self.left(name, value, NO_KEY)
        for name in ("input_mode", "disable_output_compression"):
            if not is_plain(given.get(name)):
                self.left(name, given[name])
        if given.get("disable_output_compression") is True:
            self.made.set("compress_output", False)
        self.groups(given.get("instance_groups"))
        self._distribution(given.get("distribution", given.get("distributions")))
        settings = dict(self.mapping("hyperparameters", given.get("hyperparameters")))
        for change in estimator.changes:
            if change.certain and change.name == "set_hyperparameters":
                settings |= change.keywords
            else:
                self.left(change.name, change)
        self.settings(settings)
        self.environment(given.get("environment"))
        self._tags(given.get("tags"))
        self._metrics(given.get("metric_definitions"))
        self._profiling(given.get("profiler_config"), given.get("rules"))
        self._debugger(given)
        start = self.start(estimator)
        if start is not None:
            self._inputs(start.argument("inputs", 0), given.get("input_mode"))
        return self.finished()

    def _image(self, kind: str, given: Mapping[str, Any]) -> None:
        version, python = given.get("framework_version"), given.get("py_version")
        if any(
            given.get(name) is not None for name in ("image_uri", "image_name", "image")
        ):  # the SDK then goes by the address
            return
        if kind == "HuggingFace":
            words = [
                f"{name}={given[name]}"
                for name in ("transformers_version", "pytorch_version", "py_version")
                if name in given
            ]
            self.made.unread["image"] = f"one of Hugging Face's ({', '.join(words)}): write image: {{uri: its address}}"
            return
        for key, value in (("image.framework_version", version), ("image.python", python)):
            if value is not None:
                self.put(key, value)

    def _distribution(self, given: Any) -> None:
        asked = self.mapping("distribution", given)
        for name, options in asked.items():
            if name == "instance_groups":
                groups = [self.group(group) for group in options] if isinstance(options, list) else [None]
                if None in groups:
                    self.left("compute.training_groups", options)
                else:
                    self.made.set("compute.training_groups", [group["name"] for group in groups if group])
            elif not isinstance(options, dict):
                self.left("distribution", options)
            elif name == "smdistributed" and [*options] == ["dataparallel"]:
                self._smddp(options["dataparallel"])
            elif name in ("torch_distributed", "pytorchddp"):
                self._torchrun(name, options)
            elif options.get("enabled", True):
                self.left("distribution", Unread(f"{name}: {options}", 0), "this kit starts torchrun or smddp")

    def _smddp(self, options: Any) -> None:
        if not isinstance(options, dict) or not isinstance(options.get("enabled", False), bool):
            self.left("distribution", options)
        elif options.get("enabled", False):
            self.made.values["distribution"] = "smddp"
            if options.get("custom_mpi_options"):
                self.put("custom_mpi_options", options["custom_mpi_options"])

    def _torchrun(self, name: str, options: Mapping[str, Any]) -> None:
        if not isinstance(options.get("enabled", False), bool):
            self.left("distribution", options["enabled"])
        elif options.get("enabled", False):
            self.made.values["distribution"] = "torchrun"
            for word in options.keys() - {"enabled"}:
                self.left(f"distribution.{name}.{word}", options[word], NO_KEY)
            if name == "pytorchddp":
                self.made.notes.append("the SDK's pytorchddp starts mpirun; this job starts torchrun")

    def _tags(self, tags: Any) -> None:
        """A list of {Key: …, Value: …}, or a mapping, as newer releases take too."""
        given = [{"Key": key, "Value": value} for key, value in tags.items()] if isinstance(tags, dict) else tags
        for key, value in self._pairs("tags", given, "Key", "Value"):
            self.tag(key, value)

    def _metrics(self, metrics: Any) -> None:
        for name, regex in self._pairs("metrics", metrics, "Name", "Regex"):
            self.made.values.setdefault("metrics", {})[name] = regex

    def _pairs(self, key: str, given: Any, name: str, value: str) -> Iterator[tuple[str, str]]:
        """The names and values of a list of {Name: …, Regex: …}."""
        for item in given if isinstance(given, list) else [] if given is None else [given]:
            one = item if isinstance(item, dict) else {}
            if isinstance(one.get(name), str) and isinstance(one.get(value), str):
                yield one[name], one[value]
            else:
                shown = one.get(value) if isinstance(one.get(value), (Unread, Call)) else item
                self.left(f"{key}.{one[name]}" if isinstance(one.get(name), str) else key, shown)

    def _profiling(self, config: Any, rules: Any) -> None:
        if isinstance(config, Call):
            section = self.made.values.setdefault("profiling", {})
            for name, value in config.named(*OF_PROFILER_CONFIG).items():
                if name == "system_monitor_interval_millis":
                    self.put("profiling.system_interval_ms", value)
                elif name == "s3_output_path":
                    self.put("profiling.output", value)
                elif name == "profile_params" and isinstance(value, Call):
                    known = {"cpu_profiling_duration": "cpu_seconds", "file_rotation_interval": "file_rotation_seconds"}
                    section["profiler"] = {
                        known[word]: part for word, part in value.named(*known).items() if word in known
                    }
                else:
                    self.left(f"profiler_config.{name}", value, "the framework profiler has ended")
        elif config is not None:
            self.left("profiling", config)
        for rule in rules if isinstance(rules, list) else [] if rules is None else [rules]:
            found = rule.argument("base_config", 0) if isinstance(rule, Call) else None
            if isinstance(found, Call) and "ProfilerRule" in rule.name:
                self.made.values.setdefault("profiling", {}).setdefault("rules", {})[found.short] = dict(found.keywords)
            else:
                self.left("rules", rule, "a rule on tensors: Debugger is closed to new customers")

    def _debugger(self, given: Mapping[str, Any]) -> None:
        hook = given.get("debugger_hook_config")
        metrics_unasked = given.get("profiler_config") is None and given.get("disable_profiler") is not True
        if hook is None or metrics_unasked:
            self.made.notes.append(CLOSED)
        if isinstance(hook, Call):
            section = self.made.values.setdefault("debugger", {})
            for name, value in hook.named(*OF_DEBUGGER_HOOK).items():
                if name == "s3_output_path":
                    self.put("debugger.output", value)
                elif name == "hook_parameters":
                    section["hook_parameters"] = value
                elif name == "collection_configs" and isinstance(value, list):
                    for one in value:
                        collection = one.argument("name", 0) if isinstance(one, Call) else None
                        if not isinstance(collection, str):
                            self.left("debugger.collections", one)
                            continue
                        parameters = one.argument("parameters", 1, {})
                        section.setdefault("collections", {})[collection] = parameters
                else:
                    self.left(f"debugger_hook_config.{name}", value, NO_KEY)
        elif hook is not None and hook is not False:
            self.left("debugger", hook)

    def _inputs(self, inputs: Any, mode: Any) -> None:
        """`fit`'s channels: one address or object is the channel `training`."""
        if inputs is None:
            return
        if not isinstance(inputs, dict):
            inputs = {"training": inputs}
        for name, given in inputs.items():
            channel = self.channel(str(name), given)
            if channel is not None:
                if isinstance(mode, str) and mode != "File" and not {"fsx", "efs"} & channel.keys():
                    channel.setdefault("mode", mode)
                self.made.values.setdefault("inputs", {})[str(name)] = channel
