"""A config file's text, and `key=value` overrides, as a plain mapping: YAML 1.2 scalars, no duplicate keys, line numbers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

from launcher.config import builtin_configs
from launcher.config.issues import Issue, UserError, mistake
from launcher.config.redaction import REDACTED, is_secret, mentions_a_secret


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's core schema.

    YAML 1.1, PyYAML's default, reads `1e-3` as a string, `no` as False, `010` as 8 and `1:30` as 90, so that
    a learning rate or a country code changes silently.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_CORE_SCHEMA = {  # tag: (pattern, the characters that a value may begin with); https://yaml.org/spec/1.2.2/#1032-tag-resolution
    "null": (r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    "float": (
        r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
    "merge": (r"^<<$", ["<"]),
}
for _tag, (_pattern, _first) in _CORE_SCHEMA.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes text that YAML 1.1, and here also 1.2, reads as something else: `5e-4`, `08`."""


for _tag, (_pattern, _first) in _CORE_SCHEMA.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def dumped(values: Mapping[str, Any]) -> str:
    """Values as YAML that `parse` and a YAML 1.1 reader give back unchanged."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    try:
        number = int(text[2:] if base != 10 else text, base)
        str(number)
        return number
    except ValueError:  # Python reads and writes at most 4,300 digits
        raise yaml.constructor.ConstructorError(None, None, "a number with too many digits", node.start_mark) from None


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


MAX_VALUES = 10_000
"""Most keys and values of a config, with aliases expanded. Those of configs/ have at most 200; aliases of aliases can expand to
more than any machine reads."""


class Empty(UserError):
    """A file without a key."""


class NoMapping(UserError):
    """A file with a list or one value at the top."""


@dataclass(frozen=True)
class Config:
    """A config as it was read: its values, and the line of each key."""

    source: str
    """The file's path, or its name in messages."""
    values: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    """Dotted key -> line number, from 1. A key that an override set has none."""

    smoke: bool = False
    """Whether the values are those with the `smoke` section applied."""

    def where(self, key: str) -> str:
        """`compute.instance_count (line 7)`, or the bare key if no line is known. What the smoke section sets is named there."""
        if self.smoke and f"smoke.{key}" in self.lines:
            key = f"smoke.{key}"
        return f"{key} (line {self.lines[key]})" if key in self.lines else key


def read(path: str | Path) -> Config:
    """Read a YAML config: a file, or the built-in config of that name.

    Raises:
        UserError: there is no such config, it is a script, empty, not YAML or not a mapping, or it gives a key twice.
    """
    path = builtin_configs.located(path)
    if path.suffix == ".py" and path.is_file():
        init, watch = (
            shlex.join(["launcher", *words, str(path)]) for words in (["init", "--script"], ["watch", "--", "python"])
        )
        raise mistake(
            str(path), "a Python script, not a config", f"{init} writes a config for it; {watch} runs it as it is"
        )
    return parse(text_of(path), str(path))


def text_of(path: Path) -> str:
    """The text of a YAML file. Raises UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise mistake(str(path), "a link to a file that does not exist", "correct the link") from None
    except IsADirectoryError:
        configs = ", ".join(str(file) for file in sorted(path.glob("*.yaml"))[:8])
        raise mistake(
            str(path), "a folder, not a file", f"name one of: {configs}" if configs else "check the path"
        ) from None
    except PermissionError:
        raise mistake(str(path), "no permission to read it", f"chmod u+r {path}") from None
    except UnicodeDecodeError as error:
        raise mistake(str(path), f"not UTF-8 text (byte {error.start})", "save the file as UTF-8") from None


def parse(text: str, source: str) -> Config:
    """Parse YAML text into a Config. Messages name `source`. Raises UserError as `read` does."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            fix = "launcher init writes one to start from"
            raise Empty([Issue(key=source, found="the file is empty", fix=fix)])
        if not isinstance(node, yaml.MappingNode):
            found = f"a {'sequence' if isinstance(node, yaml.SequenceNode) else 'scalar'} at the top"
            fix = "write `key: value` lines; launcher init writes a config to start from"
            raise NoMapping([Issue(key=source, found=found, valid="a mapping", fix=fix)])
        if _count(node, {}) > MAX_VALUES:
            raise mistake(
                source,
                f"more than {MAX_VALUES:,} keys and values, with its aliases written out",
                "write fewer values, and no aliases of aliases",
            )
        lines: dict[str, int] = {}
        problems = list(_check_keys(node, "", lines))
        if problems:
            raise UserError(problems, source)
        return Config(source, _written_out(loader.construct_document(node)), lines)
    except RecursionError:
        raise mistake(
            source, "an alias that contains itself, or too many nested levels", "write the values out"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        before = text.split("\n")[: mark.line + 1] if mark else [""]
        section = max((at for at, line in enumerate(before) if re.match(r"[^\s#}\]]", line)), default=0)
        line = "" if mentions_a_secret("\n".join(before[section:])) else before[-1].strip()
        raise mistake(
            where,
            f"not YAML: {error.problem or error.context}" + (f", at `{line}`" if line else ""),
            _yaml_fix(str(error.problem), line),
        ) from None
    except yaml.YAMLError as error:
        raise mistake(source, f"not YAML: {error}", "remove the character that YAML forbids") from None
    finally:
        if loader is not None:
            loader.dispose()


def override(config: Config, overrides: Sequence[str]) -> tuple[Config, list[Issue]]:
    """Set each `dotted.key=value`. A value is read as YAML, so that `[1, 2]`, `true` and `1e-3` keep their types.

    Returns:
        The changed config, and an Issue for every override that could not be applied.
    """
    values, lines, problems = deepcopy(config.values), dict(config.lines), []
    for text in overrides:
        key, equals, value_text = text.partition("=")
        key = key.strip()
        hidden = key.startswith("secrets") or mentions_a_secret(text)
        if not equals or not key or not all(key.split(".")):
            problems.append(
                Issue(
                    key="an override" if is_secret("", text) else re.split(r"[^\w.-]", text)[0] if hidden else text,
                    found="an override without a key or without `=`",
                    fix="write key=value, for example hyperparameters.epochs=1",
                )
            )
            continue
        try:
            value = parse(f"value: {value_text}", key).values["value"]
        except UserError as error:
            about = error.issues[0]
            quote = f"quote it: {key}='\"{'…' if hidden else value_text}\"'"
            problems.append(
                Issue(
                    key=key,
                    found=about.found.partition(", at `")[0] if hidden else f"`{value_text}`: {about.found}",
                    fix=about.fix if "twice" in about.found else quote,
                )
            )
            continue
        problem = put(values, key, value)
        if problem:
            problems.append(problem)
        lines = {
            known: line
            for known, line in lines.items()
            if not f"{known}.".startswith((f"{key}.", f"smoke.{key}." if config.smoke else f"{key}."))
        }
    return replace(config, values=values, lines=lines), problems


def as_override(key: str, value: Any) -> str:
    """The `key=value` text that `override` reads as this value, JSON-ready; text that YAML would read otherwise is quoted."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        if parse(f"value: {text}", key).values["value"] == value:
            return f"{key}={text}"
    except UserError:
        pass
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` applied: mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else deepcopy(value)
    return merged


def put(values: dict[str, Any], key: str, value: Any) -> Issue | None:
    """Set a dotted key in place, making mappings on the way; an Issue if another value is in the way. A number is the index, from 0, of an
    existing list item."""
    parts, at = key.split("."), cast(Any, values)
    for depth, part in enumerate(parts):
        whole, place = ".".join(parts[:depth]), cast(Any, part)
        if isinstance(at, list):
            if not part.isdecimal() or int(part) >= len(at):
                valid = ", ".join(f"{whole}.{number}" for number in range(len(at)))
                return Issue(
                    key=key, found=f"{whole} has no item {part}", valid=valid or "no items", fix=f"set {whole} itself"
                )
            place = int(part)
        elif not isinstance(at, dict):
            shown = REDACTED if mentions_a_secret(f"{whole} {at!r}") else repr(at)
            return Issue(key=key, found=f"{whole} is {shown}, not a mapping", fix=f"set {whole} itself")
        if depth == len(parts) - 1:
            at[place] = value
            break
        if isinstance(at, dict) and at.get(place) is None:
            at[place] = {}
        at = at[place]
    return None


def _written_out(value: Any) -> Any:
    """A value in which no part is shared: setting a value behind an alias changes that place alone."""
    if isinstance(value, dict):
        return {key: _written_out(item) for key, item in value.items()}
    return [_written_out(item) for item in value] if isinstance(value, list) else value


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Number of nodes at and below a node, counting those behind an alias at each use.

    Args:
        counted: the count of each node seen before, by identity, so that every node is visited once.

    Raises:
        RecursionError: a node contains itself.
    """
    if id(node) not in counted:
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        inside = (part for item in below for part in (item if isinstance(item, tuple) else (item,)))
        counted[id(node)] = 1 + sum(_count(part, counted) for part in inside)
    return counted[id(node)]


def _check_keys(node: yaml.Node, prefix: str, lines: dict[str, int], seen: set[int] | None = None) -> Iterator[Issue]:
    """Yield an Issue for every duplicate or non-text key below a node, and note each key's line.

    An aliased node is visited once, so that aliases of aliases cost no time.
    """
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _check_keys(item, f"{prefix}{index}.", lines, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    here: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if key_node.tag != "tag:yaml.org,2002:str":
            text = getattr(key_node, "value", key_node.id)
            yield Issue(key=f"{prefix}{text} (line {line})", found="a key that is not text", fix=f'quote it: "{text}":')
            continue
        key = prefix + key_node.value
        if key_node.value in here:
            first = here[key_node.value]
            yield Issue(key=key, found=f"given twice, on lines {first} and {line}", fix="keep one of them")
        here[key_node.value] = lines[key] = line
        yield from _check_keys(value_node, key + ".", lines, seen)


def _yaml_fix(problem: str, line: str) -> str:
    if "\\t" in problem or "\t" in line:
        return "indent with spaces: YAML allows no tab there"
    if "mapping values are not allowed" in problem:
        return "quote the value that contains a colon, or indent the line like its neighbours"
    if "could not determine a constructor" in problem:
        return "remove the !tag: a config holds plain values only"
    if "undefined alias" in problem:
        return "quote a value that begins with *"
    return "look for a missing quote, bracket or space after a colon on this line or the one before"
