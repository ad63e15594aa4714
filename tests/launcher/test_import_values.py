"""`launcher import`: how a script's values are followed through its code, and what is never read as certain."""

from __future__ import annotations

import pytest

from launcher.sdk_import import config_of
from launcher.sdk_import.calls import estimators
from launcher.sdk_import.source import Source
from tests.launcher.test_import import HEAD, imported


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("n = 2\nif n > 1:\n    k = 'ml.g5.xlarge'\nelse:\n    k = 'x'\nPyTorch('t.py', instance_type=k)", "instance_type", "ml.g5.xlarge"),
        ("import os\nk = 'a'\nif os.environ:\n    k = 'b'\nPyTorch('t.py', instance_type=k)", "instance_type", None),
        ("import os\nif os.environ:\n    k = 'b'\nelse:\n    k = 'b'\nPyTorch('t.py', instance_type=k)", "instance_type", "b"),
        ("for k in ['a', 'b']:\n    PyTorch('t.py', instance_type=k)", "instance_type", None),
        ("size = 'xlarge'\nPyTorch('t.py', instance_type='ml.g5.' + size)", "instance_type", "ml.g5.xlarge"),
        ("size = 'xlarge'\nPyTorch('t.py', instance_type='ml.%s.%s' % ('g5', size))", "instance_type", "ml.g5.xlarge"),
        ("PyTorch('t.py', instance_type='.'.join(['ml', 'g5', 'xlarge']))", "instance_type", "ml.g5.xlarge"),
        ("PyTorch('t.py', instance_type='{}.g5'.format('ml'))", "instance_type", "ml.g5"),
        ("def f(kind='ml.g5.xlarge'):\n    return PyTorch('t.py', instance_type=kind)", "instance_type", "ml.g5.xlarge"),
        ("def f(kind):\n    return PyTorch('t.py', instance_type=kind)", "instance_type", None),
        ("class A:\n    kind = 'ml.a'\n    def f(self):\n        PyTorch('t.py', instance_type=KIND)\nKIND = 'ml.b'", "instance_type", "ml.b"),
        ("o = {'instance_type': 'ml.a'}\no |= {'instance_type': 'ml.b'}\nPyTorch('t.py', **o)", "instance_type", "ml.b"),
        ("try:\n    k = 'ml.a'\nexcept ValueError:\n    pass\nwith open('x') as f:\n    PyTorch('t.py', instance_type=k)", "instance_type", "ml.a"),
        ("a, (b, c) = 1, (2, 'ml.c')\nPyTorch('t.py', instance_type=c)", "instance_type", "ml.c"),
        ("p = sagemaker.pytorch.PyTorch('t.py', instance_type='ml.a' if 1 < 2 else 'ml.b')", "instance_type", "ml.a"),
        ("PyTorch('t.py', instance_type='ml.a' * 10 ** 9)", "instance_type", None),
        ("PyTorch('t.py', max_run=24 * 60 * 60)", "max_hours", 24),
        ("PyTorch('t.py', max_run=100)", "max_hours", 0.0277778),
        ("PyTorch('t.py', train_instance_count=3)", "instance_count", 3),
        ("PyTorch('t.py', use_spot_instances=not False)", "spot", True),
    ],
)  # fmt: skip
def test_values_are_followed_as_far_as_they_are_certain(text, key, value):
    made = imported(text)
    assert made.values.get("compute", {}).get(key) == value
    assert (f"compute.{key}" in made.unread) == (value is None)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 80 + "1" + ")" * 80,
        "x = " + "[1] + " * 500 + "[1]",
        "x = 9 ** 9 ** 9",
        "x = f'{1:>999999999}'",
        "x = []\nx += [x]\nx.append(x)\ny = {}\ny['a'] = y",
    ],
)
def test_a_hostile_script_ends_neither_in_a_traceback_nor_in_full_memory(text):
    made = imported(f"{text}\nPyTorch('t.py', hyperparameters={{'x': x}})")
    assert made.values["script"] == "t.py"


def test_what_is_nested_or_no_json_is_noted():
    made = imported(
        "PyTorch('t.py', hyperparameters={'a': {'b': {'c': undefined, 'd': 1}}, 'e': b'x', 'f': (1, 2), 'g': [1, undefined]})"
    )
    assert made.values["hyperparameters"] == {"a": {"b": {"d": 1}}, "f": [1, 2]}
    assert set(made.unread) == {"hyperparameters.a.b.c", "hyperparameters.e", "hyperparameters.g.1"}


UNSURE = [
    "n = 3\nPyTorch('t.py', instance_type=f'ml.{n:*^9}')",
    "try:\n    k = find()\nexcept ValueError:\n    k = 'ml.a'\nPyTorch('t.py', instance_type=k)",
    "k = 'ml.a'\nwhile more():\n    k = 'ml.' + k\nPyTorch('t.py', instance_type=k)",
    "k = 'ml.a'\nfor x in range(3):\n    k += 'x'\nPyTorch('t.py', instance_type=k)",
    "h = {'instance_type': 'ml.a'}\nh.popitem()\nPyTorch('t.py', **h)",
    "h = {'instance_type': 'ml.a'}\nh.update(more())\nPyTorch('t.py', instance_type=h['instance_type'])",
    "h = {'instance_type': 'ml.a'}\ndef add(h):\n    h['instance_type'] = 'ml.b'\nadd(h)\nPyTorch('t.py', **h)",
    "h = {'instance_type': 'ml.a'}\ndef add():\n    h['instance_type'] = 'ml.b'\nadd()\nPyTorch('t.py', **h)",
    "h = {'instance_type': 'ml.a'}\nfor k in more():\n    h[k] = 'ml.b'\nPyTorch('t.py', **h)",
    "k = 'ml.a'\ndef f():\n    global k\n    k = 'ml.b'\nf()\nPyTorch('t.py', instance_type=k)",
    "match more():\n    case 1:\n        k = 'ml.a'\nPyTorch('t.py', instance_type=k)",
    "k = 'ml.a'\nif (k := more()):\n    pass\nPyTorch('t.py', instance_type=k)",
    "k = 'ml.a'\n[x, *k] = [1, 2]\nPyTorch('t.py', instance_type=k)",
    "h = {}\nh.update(more())\nPyTorch('t.py', instance_type=h.get('k', 'ml.a'))",
    "def f(kind='ml.a'):\n    PyTorch('t.py', instance_type=kind)\nf(more())",
    "@option('--kind')\ndef f(kind='ml.a'):\n    PyTorch('t.py', instance_type=kind)",
    "e = PyTorch('t.py', instance_type='ml.a')\ne.instance_type = 'ml.b'",
    "k = 'ml.a'\nif more():\n    k = 'ml.b'\nPyTorch('t.py', instance_type=k)",
    "k = 'ml.a'\ndef f():\n    PyTorch('t.py', instance_type=k)\nf()\nk = 'ml.b'",
    "if more():\n    k = 'ml.a'\nelse:\n    k = 'ml.a'\ndef f():\n    global k\n    k = 'ml.b'\nf()\nPyTorch('t.py', instance_type=k)",
    "k = ['ml.a']\nk.insert(0, 'ml.b')\nPyTorch('t.py', instance_type=k[0])",
    "k = ['ml.a']\nmore(k)\nPyTorch('t.py', instance_type=k[0])",
    "PyTorch('t.py', instance_type=[k for k in ['ml.a', 'ml.b'] if more(k)][0])",
]


@pytest.mark.parametrize("text", UNSURE)
def test_what_the_script_may_have_changed_is_never_read_as_certain(text):
    made = imported(text)
    assert "instance_type" not in made.values.get("compute", {})
    assert any("compute.instance_type" in key or key.startswith("**") for key in made.unread), made.unread


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("h = {'a': 1, 'b': 2}\nh.pop('b')\ndel h['a']\nh.setdefault('c', 3)\nprint(h.items())", {"c": 3}),
        ("h = {'a': 1}\ng = h\nif more():\n    pass\ng['b'] = 2", {"a": 1, "b": 2}),
        ("h = {'a': [1]}\nh['a'] += [2]\nh['a'].append(3)", {"a": [1, 2, 3]}),
        ("h = {'a': 1}\nif more():\n    h['b'] = 2\nelse:\n    h['b'] = 3", {"a": 1}),
        ("h = {'a': 1}\nif more():\n    raise ValueError(h)", {"a": 1}),
        ("import json\nh = {'a': 1}\njson.dumps(h)\nk = h.copy()\nk['b'] = 1", {"a": 1}),
        ("h = {'a': None, 'c': {1: 2}, 'd': float('inf')}", {"a": None, "c": {"1": 2}}),
    ],
)
def test_usual_changes_of_a_dictionary_are_followed(text, values):
    assert imported(f"{text}\nPyTorch('t.py', hyperparameters=h)").values["hyperparameters"] == values


@pytest.mark.parametrize(
    ("text", "inputs", "said"),
    [
        ("e = PyTorch('t.py')\nif more():\n    e.fit('s3://b-c/1')\nelse:\n    e.fit('s3://b-c/2')", "s3://b-c/1", "started 2 times"),
        ("e = PyTorch('t.py')\njob = e.fit('s3://b-c/1')", "s3://b-c/1", None),
        ("PyTorch('t.py').fit(**more())", None, "more()"),
        ("tuner = Tuner(PyTorch('t.py'))\ntuner.fit('s3://b-c/1')", None, "no call was seen that starts the job"),
    ],
)  # fmt: skip
def test_the_inputs_are_those_of_the_call_that_starts_the_job(text, inputs, said):
    source = Source("job.py", HEAD + text)
    made = config_of(estimators(source)[0], source)
    assert made.values.get("inputs", {}).get("training", {}).get("s3") == inputs
    assert said in made.unread["inputs"] if said else "inputs" not in made.unread


@pytest.mark.parametrize(
    ("text", "values", "unread"),
    [
        (
            "class T:\n    def make(self, kind='ml.g5.xlarge', epochs=3):\n        PyTorch('t.py', instance_type=kind, hyperparameters={'e': epochs})\n"
            "T().make('ml.p4d.24xlarge', 90)",
            {"compute": {"instance_type": "ml.p4d.24xlarge"}, "hyperparameters": {"e": 90}},
            set(),
        ),
        (
            "class Job:\n    def __init__(self, kind='ml.m5.large', count=1):\n        PyTorch('t.py', instance_type=kind, instance_count=count)\n"
            "Job('ml.p4d.24xlarge', count=4)",
            {"compute": {"instance_type": "ml.p4d.24xlarge", "instance_count": 4}},
            set(),
        ),
        (
            "class Job:\n    def __init__(self, kind='ml.m5.large'):\n        PyTorch('t.py', instance_type=kind)\n"
            "class Large(Job):\n    pass\nLarge('ml.p4d.24xlarge')",
            {},
            {"compute.instance_type"},
        ),
        (
            "def launch(lr=0.1, kind='ml.g5.xlarge'):\n    PyTorch('t.py', instance_type=kind, hyperparameters={'lr': lr})\n"
            "pool.submit(launch, 3, kind='ml.p4d.24xlarge')",
            {},
            {"compute.instance_type", "hyperparameters.lr"},
        ),
        (
            "h = {'epochs': 1}\ne = PyTorch('t.py', hyperparameters=h, environment={'A': '1'})\nh['epochs'] = 90\n"
            "e.environment['A'] = '2'\ne.fit()\ne.set_hyperparameters(lr=5)\ne.fit()",
            {"hyperparameters": {"epochs": 90}},
            {"environment"},
        ),
        ("e = PyTorch('t.py', environment={'A': '1'})\ne.environment.update({'A': '2'})\ne.fit()", {}, {"environment"}),
        (
            "[PyTorch('t.py', hyperparameters={'lr': lr}) for lr in (0.1, 0.2)]",
            {},
            {"hyperparameters.lr"},
        ),
        (
            "e = PyTorch('t.py', instance_count=2) if gpu else PyTorch('t.py')",
            {"compute": {"instance_count": 2}},
            set(),
        ),
    ],
)
def test_what_may_be_otherwise_when_it_runs_is_not_certain(text, values, unread):
    made = imported(text)
    assert {key: made.values.get(key) for key in values} == values and unread <= {*made.unread}, made
    assert not {key for key in unread if key.rpartition(".")[2] in str(made.values.get(key.partition(".")[0]))}
