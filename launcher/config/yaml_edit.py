"""Change values in a YAML text and keep everything else: comments, order, the style of each section."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from launcher.config import yaml_file


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """The text with each dotted key set.

    If the text has aliases, a value may change for another key too: compare the result with what was wanted.

    Args:
        text: YAML with a mapping at the top, as `yaml_file.parse` accepts it, or without any value.
        values: dotted key -> value, JSON-ready.
    """
    for key, value in values.items():
        path = key.split(".")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            text = _set(text, node, path, value)
        else:
            end = "" if text.endswith("\n") or not text else "\n"
            text = f"{text}{end}{written(path[0])}: {written(_nested(path[1:], value))}\n"
    return text


def without(text: str, key: str) -> str:
    """The text without a dotted key and what is below it; unchanged if the key is missing."""
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    *sections, last = key.split(".")
    for section in sections:
        node = next((below for name, below in getattr(node, "value", ()) if name.value == section), None)
        if not isinstance(node, yaml.MappingNode):
            return text
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    place = next((place for place, (name, _) in enumerate(pairs) if name.value == last), None)
    if place is None:
        return text
    begin, end = pairs[place][0].start_mark.index, _end(text, pairs[place][1])
    if node.flow_style:  # with the comma after it, or else the one before
        behind = re.compile(r"\s*,\s*").match(text, end)
        if behind:
            end = behind.end()
        elif place:
            begin = _end(text, pairs[place - 1][1])
        return text[:begin] + text[end:]
    begin = text.rfind("\n", 0, begin) + 1
    end = text.find("\n", end)
    return text[:begin] + (text[end + 1 :] if end >= 0 else "")


def _set(text: str, node: yaml.MappingNode, path: Sequence[str], value: Any) -> str:
    """The text with a path below a mapping set."""
    first, rest = path[0], path[1:]
    for key, found in node.value:
        if key.value != first:
            continue
        if rest and isinstance(found, yaml.MappingNode):
            return _set(text, found, rest, value)
        begin, end = found.start_mark.index, _end(text, found)
        if isinstance(found, yaml.CollectionNode) and not found.flow_style:  # its first line may be below the key's
            begin = text.index(":", key.end_mark.index) + 1
        blank = "" if text[begin - 1 : begin].isspace() else " "
        return f"{text[:begin]}{blank}{written(_nested(rest, value))}{text[end:]}"
    return _added(text, node, first, written(_nested(rest, value)))


def _added(text: str, node: yaml.MappingNode, key: str, value: str) -> str:
    """The text with a key at the end of a mapping."""
    if node.flow_style:
        end = node.end_mark.index - 1  # its closing bracket
        body = text[:end].rstrip()
        return f"{body}{', ' if node.value else ''}{written(key)}: {value}{text[end:]}"
    end = text.find("\n", _end(text, node))
    body, after = (f"{text}\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return f"{body}{' ' * node.start_mark.column}{written(key)}: {value}\n{after}"


def _end(text: str, node: yaml.Node) -> int:
    """Where a value's own text ends: a section's mark is where the next one begins, after comments that belong to that one."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return node.start_mark.index + len(text[node.start_mark.index : node.end_mark.index].rstrip())


def _nested(path: Sequence[str], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def written(value: Any) -> str:
    """A value on one line, for YAML 1.2, which this kit reads, and 1.1, which editors may; plain words without quotes."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{written(str(name))}: {written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(written, value)) + "]"
    text = json.dumps(value)
    before, exponent, power = text.partition("e")  # YAML 1.1 knows no 1e-07
    return f"{before}.0e{power}" if isinstance(value, float) and exponent and "." not in before else text


def _text(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*", text):
        plain = (
            yaml_file.parse(f"text: {text}", text).values["text"] == text and yaml.safe_dump([text]) == f"- {text}\n"
        )
        return text if plain else json.dumps(text)
    if '"' in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return json.dumps(text, ensure_ascii=not text.isprintable())
