"""Changes values in a YAML text and leaves all else as it is: comments, order, the style of each section."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

NOT_PLAIN = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that are no text, or were none in YAML 1.1, and so are quoted."""


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """The text with each dotted key set.

    Args:
        text: YAML with a mapping at the top, as `yaml_file.parse` accepts it, or without any value.
        values: dotted key -> value, JSON-ready.
    """
    for key, value in values.items():
        path = key.split(".")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            end = "" if text.endswith("\n") or not text else "\n"
            text = f"{text}{end}{path[0]}: {_written(_nested(path[1:], value))}\n"
            continue
        assert isinstance(node, yaml.MappingNode)
        text = _set(text, node, path, value)
    return text


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
        written = _written(_nested(rest, value))
        return f"{text[:begin]}{'' if text[begin - 1 : begin].isspace() else ' '}{written}{text[end:]}"
    return _added(text, node, first, _written(_nested(rest, value)))


def _added(text: str, node: yaml.MappingNode, key: str, written: str) -> str:
    """The text with a key at the end of a mapping."""
    if node.flow_style:
        end = node.end_mark.index - 1  # its closing bracket
        body = text[:end].rstrip()
        return f"{body}{', ' if node.value else ''}{key}: {written}{text[end:]}"
    end = text.find("\n", _end(text, node))
    body, after = (f"{text}\n", "") if end < 0 else (text[: end + 1], text[end + 1 :])
    return f"{body}{' ' * node.start_mark.column}{key}: {written}\n{after}"


def _end(text: str, node: yaml.Node) -> int:
    """Where a value's own text ends: a section's mark lies where the next one begins, behind comments that belong to that one."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return node.start_mark.index + len(text[node.start_mark.index : node.end_mark.index].rstrip())


def _nested(path: Sequence[str], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def _written(value: Any) -> str:
    """A value on one line, as YAML reads it: JSON is YAML, but a plain word needs no quotes."""
    if isinstance(value, str) and value.isidentifier() and value.lower() not in NOT_PLAIN:
        return value
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)
