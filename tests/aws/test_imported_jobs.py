"""`launcher import` of AWS's public examples: the config that it writes sends the example's request, however its script is laid out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.aws.submit import comparable
from launcher.commands import main
from tests.aws.test_reference_jobs import ENTRIES, REGION, ROLE, named, without_chance

IMPORTS = """
import boto3
import sagemaker
from sagemaker.debugger import CollectionConfig, DebuggerHookConfig, Profiler, ProfilerConfig, ProfilerRule, rule_configs
from sagemaker.huggingface import HuggingFace
from sagemaker.inputs import FileSystemInput, ShuffleConfig, TrainingInput
from sagemaker.instance_group import InstanceGroup
from sagemaker.pytorch import PyTorch
"""

MADE = """
ROLE = {role!r}
session = sagemaker.Session(boto_session=boto3.Session(region_name={region!r}))
"""


class Written(str):
    """An expression as it stands in a script."""

    __slots__ = ()


def expression(value: Any) -> str:
    """A value as Python."""
    if isinstance(value, Written):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {expression(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(expression, value)) + "]"
    return repr(value)


def called(name: str, /, *positional: Any, **keywords: Any) -> Written:
    words = [*map(expression, positional), *(f"{key}={expression(value)}" for key, value in keywords.items())]
    return Written(f"{name}({', '.join(words)})")


def arguments(sdk: Mapping[str, Any]) -> dict[str, Any]:
    """An entry's plain data as what its estimator is given, in the SDK's own objects."""
    given = {name: value for name, value in sdk.items() if name not in ("estimator", "inputs")}
    if isinstance(given.get("metric_definitions"), dict):
        given["metric_definitions"] = [
            {"Name": name, "Regex": regex} for name, regex in given["metric_definitions"].items()
        ]
    if "tags" in given:
        given["tags"] = [{"Key": key, "Value": value} for key, value in given["tags"].items()]
    if "instance_groups" in given:
        groups = {group[0]: called("InstanceGroup", *group) for group in given["instance_groups"]}
        given["instance_groups"] = [*groups.values()]
        if "instance_groups" in given.get("distribution", {}):
            chosen = [groups[name] for name in given["distribution"]["instance_groups"]]
            given["distribution"] = {**given["distribution"], "instance_groups": chosen}
    if given.get("debugger_hook_config"):
        collections = [
            called("CollectionConfig", name=name, parameters=parameters)
            for name, parameters in given["debugger_hook_config"].items()
        ]
        given["debugger_hook_config"] = called("DebuggerHookConfig", collection_configs=collections)
    if "profiler_config" in given:
        config = dict(given["profiler_config"])
        if "profile_params" in config:
            config["profile_params"] = called("Profiler", **config["profile_params"])
        given["profiler_config"] = called("ProfilerConfig", **config)
    if "rules" in given:
        given["rules"] = [
            called("ProfilerRule.sagemaker", called(f"rule_configs.{name}", **parameters))
            for name, parameters in given["rules"].items()
        ]
    return {**given, "role": Written("ROLE"), "source_dir": "source", "sagemaker_session": Written("session")}


def channels(sdk: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, given in sdk.get("inputs", {}).items():
        if isinstance(given, str):
            made[name] = given
        elif "file_system_id" in given:
            made[name] = called("FileSystemInput", **given)
        else:
            shuffled = (
                {"shuffle_config": called("ShuffleConfig", given["shuffle_config"])}
                if "shuffle_config" in given
                else {}
            )
            made[name] = called("TrainingInput", **{**given, **shuffled})
    return made


def in_one_call(sdk: Mapping[str, Any]) -> str:
    kind = sdk.get("estimator", "PyTorch")
    fit = f"estimator.fit({expression(channels(sdk))}, wait=False)" if sdk.get("inputs") else "estimator.fit()"
    return f"estimator = {called(kind, **arguments(sdk))}\n{fit}\n"


def in_many_steps(sdk: Mapping[str, Any]) -> str:
    """Variables, f-strings, a dictionary that grows, `**`, a function and a guard."""
    kind, given = sdk.get("estimator", "PyTorch"), arguments(sdk)
    lines = ["def common():", "    return {}", "", "def main(wait=True):", '    bucket = "amzn-s3-demo-bucket"']
    settings = given.pop("hyperparameters", {})
    lines += ["    settings = {}"]
    lines += [f"    settings[{name!r}] = {expression(value)}" for name, value in list(settings.items())[:2]]
    lines += [f"    settings.update({expression(dict(list(settings.items())[2:]))})"]
    lines += ["    options = dict(hyperparameters=settings, sagemaker_session=session)"]
    del given["sagemaker_session"]
    for name, value in given.items():
        text = expression(value).replace("'s3://amzn-s3-demo-bucket/", "f's3://{bucket}/")
        lines.append(f"    {name}_ = {text}" if name.isidentifier() else "")
    words = ", ".join(f"{name}={name}_" for name in given)
    lines += [f"    estimator = {kind}({words}, **options)"]
    lines += ["    data = {}"]
    for name, value in channels(sdk).items():
        text = expression(value).replace("'s3://amzn-s3-demo-bucket/", "'s3://{}/'.format(bucket) + '")
        lines.append(f"    data[{name!r}] = {text}")
    lines += ["    estimator.fit(inputs=data, wait=wait)" if sdk.get("inputs") else "    estimator.fit()"]
    return "\n".join([*lines, "", 'if __name__ == "__main__":', "    main()", ""])


def in_a_notebook(sdk: Mapping[str, Any]) -> str:
    cells = ["%pip install -U sagemaker\n!ls", "%%bash\necho $HOME", in_one_call(sdk), "not python at all"]
    return json.dumps(
        {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {},
            "cells": [
                {"cell_type": "markdown", "metadata": {}, "source": ["# A notebook"]},
                *(
                    {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": [cell]}
                    for cell in [IMPORTS + MADE.format(role=ROLE, region=REGION), *cells]
                ),
            ],
        }
    )


LAYOUTS = {"one-call.py": in_one_call, "steps.py": in_many_steps, "book.ipynb": in_a_notebook}


CASES = [(entry, "steps.py") for entry in ENTRIES]
CASES += [(entry, layout) for entry in ENTRIES[5:15:3] for layout in ("one-call.py", "book.ipynb")]


@pytest.mark.parametrize(
    ("entry", "layout"), CASES, ids=lambda given: given if isinstance(given, str) else named(given)
)
def test_a_public_example_becomes_a_config_with_the_same_request(entry, layout, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = Path("source", entry["job"]["script"])
    script.parent.mkdir(parents=True)
    script.write_text('print("training")\n')
    text = LAYOUTS[layout](entry["sdk"])
    if layout.endswith(".py"):
        text = IMPORTS + MADE.format(role=ROLE, region=REGION) + text
    Path(layout).write_text(text)
    code = main.main(["import", layout])
    reported = capsys.readouterr()
    assert code in (0, 2), reported.err
    assert "not read; fill in" not in reported.out, reported.out
    common = {"role": ROLE, "region": REGION, "source": "source"}
    expected = launcher.plan(launcher.from_values({**common, **entry["job"]}), on="aws")
    named_alike = [
        f"name={entry['job']['name']}",
        *([] if "output_path" in entry["sdk"] else [f"output={entry['job']['output']}"]),
    ]
    imported = launcher.plan(launcher.load("job.yaml", named_alike), on="aws")
    assert imported.errors == ()
    assert sent(imported) == sent(expected)


def sent(plan: launcher.Plan) -> dict[str, Any]:
    """A plan's request without its run's own name."""
    made = comparable(without_chance(plan.request))
    return json.loads(json.dumps(made).replace(plan.name, "RUN"))
