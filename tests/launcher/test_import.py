"""`launcher import`: the config it writes of scripts and notebooks, of SDK v2 and v3; what it says of the rest; and that nothing of them runs."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.commands import main
from launcher.config.yaml_edit import written
from launcher.sdk_import import config_of
from launcher.sdk_import.calls import estimators
from launcher.sdk_import.importer import Imported, lines
from launcher.sdk_import.source import Source, read

HEAD = """
import sagemaker
from sagemaker.pytorch import PyTorch
"""


ALONE = "the SDK packages t.py alone, this kit its folder: give it a folder of its own"


def imported(text: str, head: str = HEAD, which: int = 0) -> Imported:
    """The config of a script's estimator."""
    source = Source("job.py", head + textwrap.dedent(text))
    made = config_of(estimators(source)[which], source)
    if made.unread.get("inputs", "").startswith("no call was seen"):  # most of these start nothing
        del made.unread["inputs"]
    if made.unread.get("source") == f"{made.values.get('source')}: {ALONE}":  # and have no folder
        del made.unread["source"]
    return made


def typed(capsys, *words: str) -> tuple[int, str, str]:
    code = main.main(["import", *words])
    return code, *capsys.readouterr()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    Path("code/train.py").write_text("print(1)\n")
    return tmp_path


def test_what_only_the_running_script_knows_is_listed_with_its_line(here, capsys):
    Path("start.py").write_text(
        textwrap.dedent(
            """
            import os
            import sagemaker
            from sagemaker.inputs import TrainingInput
            from sagemaker.pytorch import PyTorch

            session = sagemaker.Session()
            bucket = session.default_bucket()
            estimator = PyTorch(
                entry_point="train.py", source_dir="code", role=sagemaker.get_execution_role(), instance_type=os.environ["KIND"],
                instance_count=2, framework_version="2.3.0", py_version="py311", subnets=["subnet-1", os.environ["SUBNET"]],
                hyperparameters={"epochs": 3, "bucket": bucket, "dotted.name": 1}, output_path=f"s3://{bucket}/runs",
                git_config={"repo": "https://example.com/x"},
            )
            estimator.fit({"train": TrainingInput(f"s3://{bucket}/train"), "test": "s3://amzn-s3-demo-bucket/test"})
            """
        )
    )
    code, reported, _ = typed(capsys, "start.py")
    assert code == 2, "there is something to fill in"
    for line in (
        "wrote job.yaml from PyTorch, line 9\n",
        "  role: sagemaker.get_execution_role() (line 10)\n",
        "  compute.instance_type: os.environ['KIND'] (line 10)\n",
        "  network.subnets.1: os.environ['SUBNET'] (line 11)\n",
        "  hyperparameters.bucket: session.default_bucket() (line 8)\n",
        "  output: f's3://{bucket}/runs' (line 12)\n",
        "  inputs.train: f's3://{bucket}/train' (line 15)\n",
        "  git_config: {'repo': 'https://example.com/x'}: no key of a config\n",
        "different: SageMaker's Debugger",
        "SageMaker still needs role, region, output and compute.instance_type: to be written into job.yaml\n",
        "launcher defaults sets role, region and output once, for every job\n",
        "next: launcher plan job.yaml --on aws\n",
    ):
        assert line in reported, reported
    text = Path("job.yaml").read_text()
    assert "#   role: sagemaker.get_execution_role() (line 10)" in text
    assert yaml.safe_load(text) == {
        "name": "train",
        "script": "train.py",
        "source": "code",
        "image": {"framework_version": "2.3.0", "python": "py311"},
        "compute": {"instance_count": 2},
        "hyperparameters": {"epochs": 3, "dotted.name": 1},
        "inputs": {"test": {"s3": "s3://amzn-s3-demo-bucket/test"}},
    }
    launcher.load("job.yaml")


def test_a_model_trainer_of_sdk_v3_becomes_a_config(here, capsys):
    Path("start.py").write_text(
        textwrap.dedent(
            """
            from sagemaker.core.helper.session_helper import Session
            from sagemaker.train import ModelTrainer
            from sagemaker.train.configs import (
                CheckpointConfig, Compute, FileSystemDataSource, InputData, Networking, OutputDataConfig, S3DataSource, SourceCode,
                StoppingCondition, Tag,
            )
            from sagemaker.train.distributed import Torchrun

            compute = Compute(
                instance_type="ml.p4d.24xlarge", instance_count=4, volume_size_in_gb=100, keep_alive_period_in_seconds=1800,
                enable_managed_spot_training=True,
            )
            trainer = ModelTrainer(
                training_image="763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker",
                source_code=SourceCode(source_dir="code", entry_script="train.py", requirements="requirements.txt"),
                compute=compute, distributed=Torchrun(process_count_per_node=8), base_job_name="my_job",
                role="arn:aws:iam::111122223333:role/Train", hyperparameters={"lr": 1e-3, "amp": True},
                stopping_condition=StoppingCondition(max_runtime_in_seconds=5400, max_wait_time_in_seconds=7200),
                output_data_config=OutputDataConfig(s3_output_path="s3://amzn-s3-demo-bucket/out", compression_type="NONE"),
                checkpoint_config=CheckpointConfig(s3_uri="s3://amzn-s3-demo-bucket/checkpoints"),
                networking=Networking(subnets=["subnet-0a1b2c3d"], security_group_ids=["sg-0a1b2c3d"]),
                environment={"NCCL_DEBUG": "INFO"}, tags=[Tag(key="team", value="vision")], training_mode="SAGEMAKER",
            )
            trainer.train(
                input_data_config=[
                    InputData(channel_name="train", data_source="s3://amzn-s3-demo-bucket/train"),
                    InputData(channel_name="extra", data_source=S3DataSource(
                        s3_uri="s3://amzn-s3-demo-bucket/extra", s3_data_type="S3Prefix", s3_data_distribution_type="ShardedByS3Key")),
                    InputData(channel_name="fast", data_source=FileSystemDataSource(
                        file_system_id="fs-0123456789abcdef0", file_system_type="FSxLustre", directory_path="/fsx/x",
                        file_system_access_mode="ro")),
                    InputData(channel_name="here", data_source="data/here"),
                ],
                wait=False,
            )
            """
        )
    )
    code, reported, _ = typed(capsys, "start.py", "mine.yaml")
    assert code == 2 and "data/here" in reported, "a folder that is not there"
    assert "training_mode: SAGEMAKER: no key of a config" in reported
    assert yaml.safe_load(Path("mine.yaml").read_text()) == {
        "name": "my-job",
        "script": "train.py",
        "source": "code",
        "image": {"uri": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker"},
        "compute": {
            "instance_type": "ml.p4d.24xlarge",
            "instance_count": 4,
            "volume_gb": 100,
            "keep_alive_minutes": 30,
            "spot": True,
            "processes_per_host": 8,
            "max_hours": 1.5,
            "max_wait_hours": 2,
        },
        "distribution": "torchrun",
        "role": "arn:aws:iam::111122223333:role/Train",
        "hyperparameters": {"lr": 0.001, "amp": True},
        "output": "s3://amzn-s3-demo-bucket/out",
        "compress_output": False,
        "checkpoints": {"s3": "s3://amzn-s3-demo-bucket/checkpoints"},
        "network": {"subnets": ["subnet-0a1b2c3d"], "security_groups": ["sg-0a1b2c3d"]},
        "environment": {"NCCL_DEBUG": "INFO"},
        "tags": {"team": "vision"},
        "inputs": {
            "train": {"s3": "s3://amzn-s3-demo-bucket/train"},
            "extra": {"s3": "s3://amzn-s3-demo-bucket/extra", "sharded": True},
            "fast": {"fsx": "fs-0123456789abcdef0", "path": "/fsx/x", "access": "ro"},
            "here": {"folder": "data/here"},
        },
    }


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("PyTorch('a/b/t.py')", {"script": "t.py", "source": "a/b", "name": "t"}),
        ("PyTorch(entry_point='b/t.py', source_dir='a')", {"script": "b/t.py", "source": "a"}),
        ("PyTorch('t.py', base_job_name='My Job!')", {"name": "My-Job"}),
        ("PyTorch('t.py', image_name='a/b:1', framework_version='1.3.1')", {"image": {"uri": "a/b:1"}}),
        ("PyTorch('t.py', distribution={'pytorchddp': {'enabled': True}})", {"distribution": "torchrun"}),
        ("PyTorch('t.py', distribution={'torch_distributed': {'enabled': False}})", {"distribution": None}),
        ("PyTorch('t.py', disable_output_compression=True)", {"compress_output": False}),
        ("PyTorch('t.py', debugger_hook_config=False, tags={'a': 'b'})", {"tags": {"a": "b"}}),
        ("e = PyTorch('t.py')\ne.set_hyperparameters(lr=1)\ne.fit()", {"hyperparameters": {"lr": 1}, "inputs": None}),
        ("e = PyTorch('t.py')\ne.fit('s3://b-c/d')", {"inputs": {"training": {"s3": "s3://b-c/d"}}}),
        ("e = PyTorch('t.py')\ne.fit('file://data')", {"inputs": {"training": {"folder": "data"}}}),
        ("e = PyTorch('t.py', input_mode='FastFile')\ne.fit('s3://b-c/d')", {"inputs": {"training": {"s3": "s3://b-c/d", "mode": "FastFile"}}}),
        ("d = sagemaker.Session().upload_data(path='data')\nPyTorch('t.py').fit({'x': d})", {"inputs": {"x": {"folder": "data"}}}),
        ("d = sagemaker.Session().upload_data('data')\nPyTorch('t.py', input_mode='FastFile').fit({'x': d})", {"inputs": {"x": {"folder": "data", "mode": "FastFile"}}}),
        ("PyTorch('t.py', profiler_config=sagemaker.debugger.ProfilerConfig('s3://b-c/p', 500, profile_params=sagemaker.debugger.Profiler(60)))", {"profiling": {"output": "s3://b-c/p", "system_interval_ms": 500, "profiler": {"cpu_seconds": 60}}}),
        ("PyTorch('t.py', debugger_hook_config=sagemaker.debugger.DebuggerHookConfig('s3://b-c/d'))", {"debugger": {"output": "s3://b-c/d"}}),
    ],
)  # fmt: skip
def test_an_argument_becomes_the_key_for_it(text, values):
    made = imported(text)
    assert {key: made.values.get(key) for key in values} == values
    assert not made.unread, made.unread


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("PyTorch('t.py', distribution={'mpi': {'enabled': True}})", "distribution", "this kit starts torchrun or smddp"),
        ("PyTorch('t.py', source_dir='s3://b-c/code.tar.gz')", "source", "a folder on this machine"),
        ("PyTorch('t.py', dependencies=['lib'])", "dependencies", "no key of a config"),
        ("PyTorch('t.py', **undefined)", "**undefined", "undefined (line 4)"),
        ("from sagemaker.huggingface import HuggingFace\nHuggingFace(entry_point='t.py', transformers_version='4.28')", "image", "transformers_version=4.28"),
        ("from sagemaker.debugger import Rule, rule_configs\nPyTorch('t.py', rules=[Rule.sagemaker(rule_configs.loss_not_decreasing())])", "rules", "Debugger is closed"),
        ("e = PyTorch('t.py')\ne.fit({'a': undefined})", "inputs.a", "undefined"),
        ("def f(**more):\n    o = {'entry_point': 't.py'}\n    o.update(more)\n    return PyTorch(**o)", "**more", "more (line 6)"),
        ("PyTorch('t.py', instance_groups=[undefined])", "compute.instance_groups", "undefined"),
        ("PyTorch('t.py', metric_definitions=[{'Name': 'loss', 'Regex': undefined}])", "metrics.loss", "undefined"),
    ],
)  # fmt: skip
def test_what_no_config_says_is_said(text, key, why):
    assert why in imported(text).unread[key]


def test_one_of_several_estimators_is_chosen_by_its_line(here, capsys):
    Path("two.py").write_text(HEAD + "a = PyTorch('code/train.py')\nb = PyTorch('code/train.py', instance_count=2)\n")
    code, _, reported = typed(capsys, "two.py")
    assert (
        code == 2 and "valid: PyTorch at line 4; PyTorch at line 5" in reported and "choose one: --line 4\n" in reported
    )
    assert not Path("job.yaml").exists()
    assert typed(capsys, "two.py", "--line", "7")[0] == 2
    assert "wrote job.yaml from PyTorch, line 5" in typed(capsys, "two.py", "--line", "5")[1]
    assert yaml.safe_load(Path("job.yaml").read_text())["compute"] == {"instance_count": 2}
    code, _, reported = typed(capsys, "two.py", "--line", "4")
    assert code == 2 and "job.yaml: it exists" in reported, "nothing is overwritten unasked"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.py", None, "No such file"),
        ("job.txt", "", "a file that ends with .py or .ipynb"),
        ("job.py", "def f(:\n", "job.py, line 1: invalid syntax"),
        ("job.py", "print(1)\n", "no PyTorch, HuggingFace, Estimator or ModelTrainer"),
        ("job.py", "from sagemaker.tensorflow import TensorFlow\nTensorFlow('t.py')\n", "no PyTorch, HuggingFace"),
        ("job.py", "from sagemaker.estimator import Estimator\nEstimator('image', 'role', 1, 'ml.m5.large')\n", "job.py, line 2: Estimator without a script"),
        ("job.ipynb", "[]", "no Jupyter notebook of format 4"),
        ("job.ipynb", '{"cells": []}', "no PyTorch, HuggingFace"),
        ("job.py", b"\xff\xfe", "codec can't decode"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_refused_in_words(here, capsys, name, text, said):
    if text is not None:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, reported = typed(capsys, name)
    assert code == 2 and said in reported, reported
    assert not Path("job.yaml").exists()


def test_nothing_of_the_script_runs(here, capsys):
    Path("start.py").write_text(
        HEAD + "open('ran', 'w')\n__import__('os').mkdir('ran-too')\nPyTorch('code/train.py', role=open('ran', 'w'))\n"
    )
    assert "wrote job.yaml" in typed(capsys, "start.py")[1]
    assert not Path("ran").exists() and not Path("ran-too").exists()


def test_a_cell_is_named_by_its_number(here):
    cells = [
        ("markdown", "# x"),
        ("code", "%matplotlib inline\n!ls\nimport sagemaker"),
        ("code", "  y = $z"),
        ("code", "%%time\nx = 1\nx = y"),
    ]
    book = {"cells": [{"cell_type": kind, "source": text.splitlines(keepends=True)} for kind, text in cells]}
    Path("book.ipynb").write_text(json.dumps(book))
    source = read(Path("book.ipynb"))
    assert source.text == "pass\npass\nimport sagemaker\ny = a_cell_that_is_no_Python\npass\nx = 1\nx = y"
    assert [source.where(line) for line in (1, 3, 4, 7)] == [
        "cell 2, line 1",
        "cell 2, line 3",
        "cell 3, line 1",
        "cell 4, line 3",
    ]


def test_any_value_that_was_read_is_written_as_yaml_that_reads_back():
    values = {
        "yes": "no",
        "a: b": ["x", None, {"1": "ünï # {"}],
        "q": 'it\'s "so"',
        "n": -1e-7,
        "line": "a\nb",
        "empty": {},
    }
    made = Imported({"name": "a", "hyperparameters": values}, {"role": "x"}, ["y"])
    text = "\n".join(lines(made, written))
    assert yaml.safe_load(text) == {"name": "a", "hyperparameters": values} and ast.literal_eval(repr(values)) == values


def test_secrets_stay_in_the_script(here, capsys):
    Path("start.py").write_text(
        HEAD
        + "PyTorch('code/train.py', environment={'WANDB_API_KEY': 'hunter2pass', 'A': 1}, hyperparameters={'hf_token': 'hunter3pass', "
        + "'url': 'https://me:hunter4pass@example.com/x', 'lr': 1}, output_path=find(password='hunter5pass'), tags=[{'Key': 'token', "
        + "'Value': 'hunter6pass'}])\n"
    )
    _, out, err = typed(capsys, "start.py")
    text = Path("job.yaml").read_text()
    assert "hunter" not in out + err + text, out + err + text
    made = yaml.safe_load(text)
    assert made["secrets"] == {"WANDB_API_KEY": "env"} and made["environment"] == {"A": "1"}
    assert made["hyperparameters"] == {"lr": 1}
    assert "WANDB_API_KEY: its value stays in the script" in out and "hyperparameters.hf_token: ***" in out


def test_a_script_without_a_folder_takes_along_what_lies_beside_it_and_says_so():
    source = Source("job.py", HEAD + "PyTorch('a/t.py').fit()")
    assert config_of(estimators(source)[0], source).unread["source"] == f"a: {ALONE}"


def test_a_text_of_the_script_stays_on_its_line_of_the_config(here, capsys):
    evil = "a\\nrole: arn:aws:iam::666666666666:role/evil\\nx: #\\x1b]0;"
    Path("start.py").write_text(
        HEAD + f"PyTorch('code/train.py', foo='{evil}', hyperparameters={{'a': '{evil}', 'b': '\\ud800'}})\n"
    )
    _, out, _ = typed(capsys, "start.py")
    assert "\x1b" not in out and "role" not in yaml.safe_load(Path("job.yaml").read_text())


def test_a_notebooks_paths_are_those_of_its_folder(here):
    Path("books").mkdir()
    text = "e = PyTorch('train.py', source_dir='code')\ne.fit({'a': 'file://data', 'b': sagemaker.Session().upload_data('up')})"
    book = {
        "cells": [
            {"cell_type": "code", "source": [HEAD + text]},
            {"cell_type": "code", "source": ["files = !ls\n", "x?\n", "!a \\\n", " b"]},
        ]
    }
    Path("books/book.ipynb").write_text(json.dumps(book))
    source = read(Path("books/book.ipynb"))
    made = config_of(estimators(source)[0], source)
    assert made.values["source"] == "books/code" and not source.skipped
    assert made.values["inputs"] == {"a": {"folder": "books/data"}, "b": {"folder": "books/up"}}


def test_sdk_v3s_own_defaults_are_written_out():
    head = "from sagemaker.train import ModelTrainer\nfrom sagemaker.train.configs import CheckpointConfig, InputData, SourceCode\n"
    text = """
        code = SourceCode(source_dir='code', entry_script='t.py', requirements='reqs/gpu.txt')
        trainer = ModelTrainer(source_code=code, input_data_config=[InputData(channel_name='a', data_source='s3://b-c/1')], networking=None)
        trainer = trainer.with_checkpoint_config(CheckpointConfig(s3_uri='s3://b-c/k')).with_retry_strategy(3)
        trainer.train(input_data_config=[InputData(channel_name='b', data_source='s3://b-c/2')])
        """
    made = imported(text, head)
    assert made.values["compute"] == {"max_hours": 1, "instance_type": "ml.m5.xlarge"}
    assert set(made.values["inputs"]) == {"a", "b"} and made.values["checkpoints"] == {"s3": "s3://b-c/k"}
    assert set(made.unread) == {"source_code.requirements", "with_retry_strategy"}


@pytest.mark.parametrize(
    ("given", "compute"),
    [
        ("max_wait_time_in_seconds=7200", {"max_hours": 1, "max_wait_hours": 2}),
        ("max_runtime_in_seconds=None", {"max_hours": 1}),
        ("**limits()", {}),
    ],
)
def test_a_stopping_condition_without_a_run_time_is_an_hour_as_sdk_v3_sends_it(given, compute):
    head = (
        "from sagemaker.train import ModelTrainer\nfrom sagemaker.train.configs import SourceCode, StoppingCondition\n"
    )
    text = f"""
        code = SourceCode(source_dir='code', entry_script='t.py')
        ModelTrainer(source_code=code, stopping_condition=StoppingCondition({given})).train()
        """
    assert imported(text, head).values["compute"] == {**compute, "instance_type": "ml.m5.xlarge"}


def test_a_trainers_mode_is_that_of_its_channels_in_s3_also_of_those_that_are_uploaded():
    head = "from sagemaker.train import ModelTrainer\nfrom sagemaker.train.configs import FileSystemDataSource, InputData, SourceCode\n"
    text = """
        trainer = ModelTrainer(source_code=SourceCode(source_dir='code', entry_script='t.py'), training_input_mode='FastFile')
        disk = FileSystemDataSource(file_system_id='fs-0123456789abcdef0', file_system_type='FSxLustre', directory_path='/fsx/x')
        trainer.train(input_data_config=[
            InputData(channel_name='far', data_source='s3://b-c/1'), InputData(channel_name='here', data_source='data'),
            InputData(channel_name='disk', data_source=disk),
        ])
        """
    found = imported(text, head).values["inputs"]
    assert {name: channel.get("mode") for name, channel in found.items()} == {
        "far": "FastFile",
        "here": "FastFile",
        "disk": None,
    }


def test_an_expression_under_a_secrets_name_is_not_shown():
    made = imported(
        "PyTorch('t.py', environment={'DB_PASSWORD': wrap('hunter2hunter2')}, hyperparameters={'api_key': a + f('s3cr3t')})"
    )
    assert "hunter2" not in str(made) and "s3cr3t" not in str(made)
    assert {"environment.DB_PASSWORD", "hyperparameters.api_key"} <= {*made.unread}


def test_a_question_in_a_comment_of_a_notebook_is_no_question_to_ipython(here):
    cell = "%time\nh = {'epochs': 1}\nh['epochs'] = 90  # is it enough?\nPyTorch('code/train.py', hyperparameters=h)\nPyTorch?"
    cells = [{"cell_type": "code", "source": [HEAD]}, {"cell_type": "code", "source": [cell]}]
    Path("asks.ipynb").write_text(json.dumps({"cells": cells}))
    [found] = estimators(read(Path("asks.ipynb")))
    assert found.made.keywords["hyperparameters"] == {"epochs": 90}
