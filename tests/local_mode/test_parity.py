"""The same job as processes and in containers: what the script sees and leaves is the same, but for what each backend declares."""

from __future__ import annotations

import json
import re

import pytest

import launcher
from launcher.backends import docker, process
from tests.local_mode.conftest import wait_for_state

SEEN = """
    import json, os, pathlib, sys
    rank = os.environ.get("RANK", "0")
    config = pathlib.Path(os.environ["SM_INPUT_CONFIG_DIR"])
    seen = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "config": {file.name: json.loads(file.read_text()) for file in sorted(config.iterdir())},
        "channels": {name: sorted(os.listdir(f"/{config}/../data/{name}")) for name in json.loads(os.environ["SM_CHANNELS"])},
        "folder": os.getcwd(), "code": sorted(os.listdir(os.environ["SM_MODULE_DIR"])),
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
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "HOSTNAME",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
}
"""Variables that no backend promises: they are the image's, or this shell's."""

OF_THE_IMAGE = {"PYTHONIOENCODING", "SM_DLC_TORCH_VERSION", "LD_LIBRARY_PATH", "CUDA_HOME", "PYTHONPATH"}

OF_A_RUN = re.compile(r"TORCHELASTIC_\w+")
"""Set by torchrun for this one run."""


def seen_by(run: launcher.Run, host: str, rank: int) -> dict:
    [file] = (run.folder.host(host) / "output/data").glob(f"*/seen-{rank}.json")
    text = file.read_text().replace(str(run.folder.host(host)), "/opt/ml").replace(run.name, "RUN")
    for number in (1, 2):  # the declared names of hosts
        text = text.replace(f"127.0.0.{number}", f"algo-{number}")
    return json.loads(text)


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_same_job_gives_the_same_script_the_same(docker_job, tmp_path, monkeypatch, hosts):
    for name in list(process.local_hosts.PASSED_ON):
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data"
    data.mkdir()
    (data / "image.txt").write_text("pixels")
    job = docker_job(
        SEEN,
        inputs={"train": {"folder": str(data)}, "weights": {"file": str(data / "image.txt")}},
        environment={"MINE": "it's; $HOME"},
        hyperparameters={"a": 1, "name": "it's", "table": {"x": [1, None]}, "none": None, "rate": 0.1, "deep": True},
        **(
            {"distribution": "torchrun", "compute": {"instance_count": 2, "processes_per_host": 2}}
            if hosts == 2
            else {}
        ),
    )
    plans = {name: launcher.plan(job, on=name) for name in ("process", "docker")}
    runs = {name: launcher.run(plan) for name, plan in plans.items()}
    for run in runs.values():
        wait_for_state(run, "Completed", 120)
    declared = {*process.DIFFERENCES, *docker.DIFFERENCES}
    for index in range(hosts):
        host = f"algo-{index + 1}"
        for rank in range(2 * index, 2 * index + 2) if hosts == 2 else [0]:
            one, two = (seen_by(runs[name], host, rank) for name in ("process", "docker"))
            for key in ("arguments", "channels", "folder", "code"):
                assert one[key] == two[key], key
            assert one["arguments"][:2] == ["-a", "1"]
            for name, config in one["config"].items():
                assert _without_declared(config) == _without_declared(two["config"][name]), name
            differing = {
                name
                for name in one["environment"].keys() | two["environment"].keys()
                if _comparable(one["environment"].get(name)) != _comparable(two["environment"].get(name))
            }
            differing -= OF_THE_SHELL | OF_THE_IMAGE | declared
            assert {name for name in differing if not OF_A_RUN.fullmatch(name)} == set(), {
                name: (one["environment"].get(name), two["environment"].get(name)) for name in differing
            }
    assert runs["process"].result() == runs["docker"].result() == {"accuracy": 0.5}
    assert runs["process"].metrics() == runs["docker"].metrics() == [{"step": 1, "loss": 2.0}]
    assert set(runs["process"].artifacts()) == set(runs["docker"].artifacts())
    for name, plan in plans.items():  # and each plan showed the command that ran
        lines = [line for host, line in runs[name].logs() if host == "algo-1" and line]
        ran = lines[lines.index("Invoking script with the following command:") + 1]
        shown = " ".join(plan.hosts[0].command)
        assert re.sub(r"^\S*python\S*|--master_port \S+", "", ran) == re.sub(
            r"^\S*python\S*|--master_port (<free port>|\S+)", "", shown
        )
    commands = [re.sub(r"127\.0\.0\.(\d)", r"algo-\1", " ".join(plan.hosts[-1].command)) for plan in plans.values()]
    one, two = (re.sub(r"^\S*python\S*|--master_port (<free port>|\S+)", "", command) for command in commands)
    assert one == two


def _comparable(value: str | None) -> object:
    """Nested settings, without what is declared to differ inside of them."""
    try:
        return _without_declared(json.loads(value or ""))
    except ValueError:
        return value


def _without_declared(value: object) -> object:
    if isinstance(value, dict):
        names = ("network_interface_name", "sagemaker_submit_directory", "sagemaker_region")
        return {key: _without_declared(item) for key, item in value.items() if key not in names}
    return [_without_declared(item) for item in value] if isinstance(value, list) else value
