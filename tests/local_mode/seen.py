"""What a script sees of its job, and how that of two backends compares."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

SEEN = """
    import json, os, pathlib, sys
    rank = os.environ.get("RANK", "0")
    config = pathlib.Path(os.environ["SM_INPUT_CONFIG_DIR"])
    seen = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "config": {file.name: json.loads(file.read_text()) for file in sorted(config.iterdir()) if file.suffix == ".json"},
        "channels": {name: sorted(os.listdir(f"/{config}/../data/{name}")) for name in json.loads(os.environ["SM_CHANNELS"])},
        "code": sorted(os.listdir()), "base": str(config.parents[1]),
    }
    output = pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"])
    output.mkdir(exist_ok=True)
    (output / f"seen-{rank}.json").write_text(json.dumps(seen))
    if rank == "0":
        (output / "result.json").write_text('{"accuracy": 0.5}')
        (output / "metrics-0.jsonl").write_text('{"step": 1, "loss": 2.0}\\n')
        pathlib.Path(os.environ["SM_MODEL_DIR"], "weights").write_text("w")
    if "RANK" in os.environ:
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
"""

OF_THE_SHELL = {
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "HOSTNAME", "PWD", "OLDPWD"),
    *("SHLVL", "_", "no_proxy", "LD_LIBRARY_PATH", "CUDA_HOME", "PYTHONPATH", "PYTHONIOENCODING", "SM_DLC_TORCH_VERSION"),
}  # fmt: skip
"""Variables that no backend promises: they are the image's, or this shell's."""

OF_A_RUN = re.compile(r"TORCHELASTIC_\w+")
"""Set by torchrun for this one run."""

NESTED = {
    "network_interface_name": "SM_NETWORK_INTERFACE_NAME",
    "current_instance_type": "SM_CURRENT_INSTANCE_TYPE",
    "instance_type": "SM_CURRENT_INSTANCE_TYPE",
    "sagemaker_instance_type": "SM_CURRENT_INSTANCE_TYPE",
    "sagemaker_region": "SAGEMAKER_REGION",
    "sagemaker_submit_directory": "SM_MODULE_DIR",
    "module_dir": "SM_MODULE_DIR",
    "current_group_name": "SM_INSTANCE_GROUPS",
    "current_instance_group_hosts": "SM_CURRENT_INSTANCE_GROUP_HOSTS",
    "distribution_hosts": "SM_INSTANCE_GROUPS",
    "instance_groups": "SM_INSTANCE_GROUPS",
    "instance_groups_dict": "SM_INSTANCE_GROUPS_DICT",
    "RecordWrapperType": "SM_INPUT_DATA_CONFIG",
    "S3DistributionType": "SM_INPUT_DATA_CONFIG",
}
"""Where the value of a variable stands in other variables and files: a key there -> the variable, by which it is declared."""


class Seen:
    """What one rank's script saw of a run, with the names of folders, runs and hosts that are the same on all backends.

    Args:
        folder: the run's folder, or that of SageMaker's own local mode.
        name: the run's.
    """

    def __init__(self, folder: Path, name: str, rank: int, host: str = "*"):
        [file] = folder.rglob(f"output/data/{host}/seen-{rank}.json")
        text = file.read_text()
        self.raw = json.loads(text)["environment"]
        text = text.replace(json.loads(text)["base"], "/opt/ml").replace(name, "RUN")
        seen = json.loads(re.sub(r"127\.0\.0\.(\d)|algo-(\d)-[a-z0-9]{5}\b", r"algo-\1\2", text))
        self.environment, self.config = seen.pop("environment"), seen.pop("config")
        self.rest = seen


def compare(one: Seen, other: Seen, of_one: Mapping[str, str], of_other: Mapping[str, str]) -> None:
    """What differs is declared by one of the two, and what only one of them declares does differ."""
    declared = {*of_one, *of_other}
    assert one.rest == other.rest and one.rest["arguments"][:2] == ["-a", "1"]
    assert {name: _without(declared, config) for name, config in one.config.items()} == {
        name: _without(declared, config) for name, config in other.config.items()
    }
    names = {name for name in {*one.raw, *other.raw} - OF_THE_SHELL if not OF_A_RUN.fullmatch(name)}
    values = {name: (one.environment.get(name), other.environment.get(name)) for name in names - declared}
    undeclared = {
        name: pair for name, pair in values.items() if _comparable(declared, pair[0]) != _comparable(declared, pair[1])
    }
    assert undeclared == {}
    for name in ({*of_one} ^ {*of_other}) & names:
        assert one.raw.get(name) != other.raw.get(name), f"{name} is declared to differ"


def _comparable(declared: set[str], value: str | None) -> object:
    """A variable's value, or the JSON in it without what is declared."""
    try:
        return _without(declared, json.loads(value or ""))
    except ValueError:
        return value


def _without(declared: set[str], value: object) -> object:
    if isinstance(value, dict):
        return {key: _without(declared, item) for key, item in value.items() if NESTED.get(key) not in declared}
    return [_without(declared, item) for item in value] if isinstance(value, list) else value
