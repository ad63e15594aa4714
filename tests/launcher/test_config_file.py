"""Config files: YAML 1.2's scalars, duplicate keys, and every way in which a file cannot be read."""

import shlex
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.config import yaml_file
from launcher.config.issues import UserError


def values(text: str) -> dict:
    return yaml_file.parse(text, "test.yaml").values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-2", -2), ("010", 10), ("1_000", "1_000"), ("1:30", "1:30"),
        ("no", "no"), ("on", "on"), ("Yes", "Yes"), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("2024-01-02", "2024-01-02"), ("0x10", 16), ("0o17", 15), (".inf", float("inf")), ("'5'", "5"), ("1.10.2", "1.10.2"),
    ],
)  # fmt: skip
def test_scalars_are_read_as_yaml_1_2_says(text, value):
    assert values(f"key: {text}") == {"key": value}
    assert type(values(f"key: {text}")["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "a sequence at the top"),
        ("just text", "a scalar at the top"),
        ("a: 1\na: 2\n", "a: given twice, on lines 1 and 2"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", "a.b: given twice, on lines 2 and 4"),
        ("1: x", "a key that is not text"),
        ("a: [1, 2", "test.yaml:1: not YAML"),
        ("a:\n\tb: 1\n", "indent with spaces"),
        ("a: b: c", "quote the value that contains a colon"),
        ("a: !!python/object:os.system x", "remove the !tag"),
        ("a: *nothing", "quote a value that begins with *"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("a: \x07", "not YAML"),
        ("a: " + "9" * 5000, "a number with too many digits"),
        ("a: " + "[" * 2000 + "]" * 2000, "too many nested levels"),
    ],
)
def test_a_file_that_cannot_be_read_says_why_and_what_to_do(text, expected):
    with pytest.raises(UserError) as error:
        values(text)
    assert expected in str(error.value)
    assert "fix:" in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        *(2, 1e-05, True, None, [1, "2"], {"views": 3, "where": None}, {"a": {"b": ["c: d"]}}, "bf16", "data/food/train"),
        *("2", "true", "null", "", " x", "a: b", "a #b", "{x}", "it's", 'quo"te', "a\nb", "~/x", "*a", "ünï-码", "😀", "expandable_segments:True"),
    ],
)  # fmt: skip
def test_an_override_that_was_written_is_read_as_the_same_value(value):
    changed, problems = yaml_file.override(yaml_file.Config("test.yaml", {}), [yaml_file.as_override("one.two", value)])
    assert (changed.values, problems) == ({"one": {"two": value}}, [])
    assert type(changed.values["one"]["two"]) is type(value)


def test_a_plain_word_is_written_without_quotes():
    assert yaml_file.as_override("precision", "bf16") == "precision=bf16"
    assert yaml_file.as_override("environment.OMP_NUM_THREADS", "1") == 'environment.OMP_NUM_THREADS="1"'


def test_a_missing_file_names_the_ones_beside_it(tmp_path):
    (tmp_path / "right.yaml").write_text("a: 1")
    with pytest.raises(UserError, match=r"no such file, .*\n.*right\.yaml"):
        yaml_file.read(tmp_path / "wrong.yaml")


def test_a_script_in_the_place_of_a_config_is_answered_with_the_commands_that_take_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "my train.py"):
        Path(name).write_text("import os\nif os: print('a: b')\n")
        with pytest.raises(UserError) as error:
            yaml_file.read(name)
        [issue] = error.value.issues
        quoted = shlex.quote(name)
        assert (issue.key, issue.found) == (name, "a Python script, not a config")
        assert f"launcher init --script {quoted} writes" in issue.fix
        assert f"launcher watch -- python {quoted} runs" in issue.fix


def test_a_folder_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="a folder, not a file"):
        yaml_file.read(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        yaml_file.read(tmp_path / "binary.yaml")


def test_overrides_reach_any_depth_and_keep_their_types():
    config, problems = yaml_file.override(
        yaml_file.parse("a: {b: 1}\nc: 2\n", "x"), ["a.b=1e-4", "a.d=[1, x]", "e.f.g=true", "c='7'", "h=it=s"]
    )
    assert problems == []
    assert config.values == {"a": {"b": 1e-4, "d": [1, "x"]}, "c": "7", "e": {"f": {"g": True}}, "h": "it=s"}


def test_wrong_overrides_are_all_reported_at_once():
    config, problems = yaml_file.override(
        yaml_file.parse("a: 1", "x"), ["plain", "a.b=2", "=3", "c=[", "d..e=1", "f=1"]
    )
    assert [issue.key for issue in problems] == ["plain", "a.b", "=3", "c", "d..e=1"]
    assert config.values == {"a": 1, "f": 1}


def test_merge_replaces_lists_and_merges_mappings():
    assert yaml_file.merge({"a": {"b": 1, "c": [1, 2]}, "d": 1}, {"a": {"c": [3]}, "d": {"e": 1}}) == {
        "a": {"b": 1, "c": [3]},
        "d": {"e": 1},
    }


@pytest.mark.parametrize(
    ("first", "more"),
    [
        ("[x, x]", "[*before, *before, *before, *before]"),
        ("{x: x}", "{y: *before, z: *before}"),
        ("{x: x}", "{<<: [*before, *before]}"),
    ],
)
def test_aliases_that_stand_for_too_many_values_are_refused(first, more):
    lines = [f"a0: &a0 {first}"] + [f"a{n}: &a{n} {more}".replace("before", f"a{n - 1}") for n in range(1, 40)]
    assert len(values("\n".join(lines[:4]))) == 4
    with pytest.raises(UserError, match="test.yaml: more than 10,000 keys and values, with its aliases written out"):
        values("\n".join(lines))


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "a: &a [[*a]]"])
def test_an_alias_that_contains_itself_is_refused(text):
    with pytest.raises(UserError, match="an alias that contains itself"):
        values(text)


def test_the_same_dotted_key_written_in_two_ways_is_not_twice():
    assert values('"a.b": 1\na: {b: 2}') == {"a.b": 1, "a": {"b": 2}}


def test_an_override_with_a_duplicate_or_odd_key_is_refused():
    _, problems = yaml_file.override(yaml_file.parse("a: 1", "x"), ["b={c: 1, c: 2}", "d={1: 2}"])
    assert [issue.key for issue in problems] == ["b", "d"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [([], "smoke.compute.instance_count (line 4)"), (["compute.instance_count=-1"], "compute.instance_count")],
)
def test_with_smoke_a_mistake_of_the_smoke_section_is_named_there(tmp_path, overrides, key):
    config = tmp_path / "config.yaml"
    config.write_text("name: x\nscript: train_kd.py\nsmoke:\n  compute: {instance_count: 0}\n")
    with pytest.raises(UserError) as refused:
        launcher.load(config, overrides, smoke=True)
    assert key in [issue.key for issue in refused.value.issues]


def test_an_override_behind_an_alias_changes_that_place_alone():
    read = yaml_file.parse("hyperparameters: &small {epochs: 1}\nsmoke: {hyperparameters: *small}\n", "test")
    changed, problems = yaml_file.override(read, ["smoke.hyperparameters.epochs=2"])
    assert not problems and changed.values == {
        "hyperparameters": {"epochs": 1},
        "smoke": {"hyperparameters": {"epochs": 2}},
    }


@pytest.mark.parametrize(
    "text", ["08", "5e-4", "1e3", "0o17", "0x1f", "1_000", "1:30", "no", "on", "true", "null", "~", "", "2024-01-02", ".inf", "<<", "a: b"]
)  # fmt: skip
def test_a_text_that_is_written_is_read_as_a_text_by_either_yaml(text):
    written = yaml_file.dumped({"environment": {"KEY": text}})
    assert values(written) == yaml.safe_load(written) == {"environment": {"KEY": text}}


def test_numbers_that_are_written_are_read_as_they_were():
    kept = {
        "rate": 5e-4,
        "tiny": 1e-07,
        "large": 1e22,
        "steps": 8,
        "on": True,
        "off": False,
        "none": None,
        "list": [0.1, "x"],
    }
    assert values(yaml_file.dumped(kept)) == yaml.safe_load(yaml_file.dumped(kept)) == kept
    assert [*values(yaml_file.dumped(kept))] == [*kept]
