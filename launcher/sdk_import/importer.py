"""A config's values as found in calls of the SDK, and what could not be read: the part that both versions share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from launcher.config.issues import mistake
from launcher.config.redaction import REDACTED, holds_a_secret, is_secret, mentions_a_secret
from launcher.config.secret_shapes import names_a_secret
from launcher.sdk_import.objects import Call, Estimator, Symbol, Unread, is_plain
from launcher.sdk_import.source import Source

HOUR, MINUTE = 3600, 60

FILE_SYSTEMS = {"FSxLustre": "fsx", "EFS": "efs"}

OF_TRAINING_INPUT: Mapping[str, tuple[str, str | None]] = {
    "s3_data": ("s3", None),
    "distribution": ("sharded", "FullyReplicated"),
    "compression": ("compression", None),
    "content_type": ("content_type", None),
    "record_wrapping": ("record_wrapper", None),
    "s3_data_type": ("data_type", "S3Prefix"),
    "instance_groups": ("instance_groups", None),
    "input_mode": ("mode", None),
    "attribute_names": ("attributes", None),
    "target_attribute_name": ("", None),
    "shuffle_config": ("shuffle_seed", None),
}
"""Argument of TrainingInput, in its order (2.257.7) -> key of an input, and the value that a config leaves out."""


NO_KEY = "no key of a config"
IN_THE_SCRIPT = "what seems to be a secret stays in the script: a config's `secrets` name it"


@dataclass
class Imported:
    """What could be read from an estimator."""

    values: dict[str, Any] = field(default_factory=dict)
    """A config's values, nested."""
    unread: dict[str, str] = field(default_factory=dict)
    """Key of the config, or argument of the SDK -> what stands there, and where."""
    notes: list[str] = field(default_factory=list)
    """Where the job differs from the SDK's."""

    def set(self, key: str, value: Any) -> None:
        """Set a dotted key."""
        *sections, last = key.split(".")
        at = self.values
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value


class Importer:
    """Turns calls of the SDK into a config."""

    def __init__(self, source: Source):
        self.source = source
        self.made = Imported()

    def script(self, entry: Any, folder: Any, call: Call) -> None:
        """Set `script` and `source`. Without a folder, the SDK takes the script from where it is.

        Raises:
            UserError: the image's own program is to run.
        """
        if entry is None:
            if any(name.startswith("**") for name in call.keywords):  # it may be among those
                self.made.unread["script"] = (
                    f"not among the arguments that could be read ({self.source.where(call.line)})"
                )
                return
            raise mistake(
                "FILE",
                f"{self.source.name}, {self.source.where(call.line)}: {call.short} without a script, so that its image's own program runs",
                "give it a script (entry_point, or source_code of SDK v3); this kit starts scripts",
            )
        known = folder is None or (isinstance(folder, str) and not folder.startswith("s3://"))
        if isinstance(folder, str) and not known:
            self.left("source", Unread(folder, call.line), "in S3; a config's source is a folder on this machine")
        elif not known:
            self.left("source", folder)
        if not isinstance(entry, str):
            self.left("script", entry)
            return
        path = PurePosixPath(entry)
        self.made.values["script"] = path.name if folder is None else str(path)
        if known:
            self.made.values["source"] = place = self.source.path(str(path.parent) if folder is None else folder)
            if folder is None:
                self.left(
                    "source",
                    place,
                    f"the SDK packages {path.name} alone, this kit its folder: give it a folder of its own",
                )

    def name(self, name: Any) -> None:
        if name is not None and not isinstance(name, str):
            self.left("name", name)
        text = name if isinstance(name, str) else PurePosixPath(str(self.made.values.get("script", "job"))).stem
        cleaned = re.sub(r"[^a-zA-Z0-9]+", "-", text)[:42].strip("-") or "job"
        self.made.values = {"name": cleaned, **self.made.values}

    def region(self, session: Any) -> None:
        """The region of `Session(boto_session=boto3.Session(region_name=…))`."""
        if isinstance(session, Call):
            boto = session.argument("boto_session", 0)
            region = boto.keywords.get("region_name") if isinstance(boto, Call) else None
            if region is not None:
                self.put("region", region)

    def groups(self, groups: Any) -> None:
        if groups is None:
            return
        made = []
        for group in groups if isinstance(groups, list) else [groups]:
            one = self.group(group)
            if one is None:
                self.left("compute.instance_groups", group)
                return
            made.append(one)
        self.made.set("compute.instance_groups", made)

    def group(self, group: Any) -> dict[str, Any] | None:
        if not isinstance(group, Call):
            return None
        names = ("instance_group_name", "instance_type", "instance_count")
        found = [group.argument(name, place) for place, name in enumerate(names)]
        if not all(isinstance(value, (str, int)) for value in found):
            return None
        return dict(zip(("name", "instance_type", "instance_count"), found))

    def channel(self, name: str, given: Any) -> dict[str, Any] | None:
        if isinstance(given, Call) and given.short in ("TrainingInput", "s3_input"):
            return self.s3_input(name, given)
        if isinstance(given, Call) and given.short == "FileSystemInput":
            return self.file_system(name, given)
        if isinstance(given, Call) and given.short == "upload_data" and isinstance(given.argument("path", 0), str):
            return {"folder": self.source.path(given.argument("path", 0))}  # a run uploads it
        if isinstance(given, str):
            return self.address(given)
        self.left(f"inputs.{name}", given)
        return None

    def address(self, text: str) -> dict[str, Any]:
        """An input by its address."""
        return (
            {"folder": self.source.path(text.removeprefix("file://"))} if text.startswith("file://") else {"s3": text}
        )

    def s3_input(self, name: str, given: Call) -> dict[str, Any] | None:
        """A TrainingInput."""
        words = given.named(*OF_TRAINING_INPUT)
        made = self.channel(name, words.pop("s3_data", None))
        if made is None:
            return None
        for word, value in words.items():
            key, usual = OF_TRAINING_INPUT.get(word, ("", None))
            if word == "shuffle_config" and isinstance(value, Call):
                value = value.argument("seed", 0)
            if not key or not is_plain(value):
                self.left(f"inputs.{name}.{key or word}", value)
            elif value not in (None, usual):
                made[key] = True if key == "sharded" else value
        return made

    def file_system(self, name: str, given: Call) -> dict[str, Any] | None:
        order = ("file_system_id", "file_system_type", "directory_path", "file_system_access_mode", "content_type")
        found = {word: given.argument(word, place) for place, word in enumerate(order)}
        kind = FILE_SYSTEMS.get(str(found["file_system_type"]))
        if kind is None or not is_plain(found):
            self.left(f"inputs.{name}", given)
            return None
        made = {
            kind: found["file_system_id"],
            "path": found["directory_path"],
            "access": found["file_system_access_mode"],
        }
        made |= {"content_type": found["content_type"]}
        return {key: value for key, value in made.items() if value is not None}

    def settings(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            self.put(f"hyperparameters.{name}", value, name=str(name))

    def put(self, key: str, value: Any, name: str = "") -> None:
        """Set a key to the part of a value that was read, and note the rest. Secrets stay in the script.

        Args:
            name: a hyperparameter's name, which may contain dots.
        """
        if value is None and not name:  # the SDK's own default, which is a config's too
            return
        plain, left = _plain(value)
        for place, part in left:
            self.left(".".join([key, *place]), part)
        if plain is UNREAD:
            return
        if holds_a_secret(name or key.rpartition(".")[2], plain):
            self.left(key, REDACTED, IN_THE_SCRIPT)
        elif name:
            self.made.values.setdefault("hyperparameters", {})[name] = plain
        else:
            self.made.set(key, plain)

    def tag(self, name: str, value: str) -> None:
        """One tag, unless it seems to hold a secret."""
        if is_secret(name, value):
            self.left(f"tags.{name}", REDACTED, IN_THE_SCRIPT)
        else:
            self.made.values.setdefault("tags", {})[name] = value

    def environment(self, given: Any) -> None:
        """Set the script's variables. One that seems to hold a secret must come from the environment of whoever starts the job."""
        for name, value in self.mapping("environment", given).items():
            if isinstance(value, str) and is_secret(str(name), value):
                self.made.values.setdefault("secrets", {})[str(name)] = "env"
                self.made.notes.append(
                    f"{name}: its value stays in the script; runs here take it from your environment, "
                    "SageMaker only from Secrets Manager (docs/run.md)"
                )
            elif isinstance(value, (Unread, Call, Symbol)):
                self.left(f"environment.{name}", value)
            else:
                self.made.values.setdefault("environment", {})[str(name)] = str(value)

    def start(self, estimator: Estimator) -> Call | None:
        """The call that starts the job, the first of several; None, with a note, if none was seen."""
        for one in estimator.starts:
            for word in (word for word in one.keywords if word.startswith("**")):
                self.left("inputs", one.keywords[word])
        if not estimator.starts:
            self.made.unread["inputs"] = "no call was seen that starts the job: write the channels that it reads"
        elif len(estimator.starts) > 1:
            places = ", ".join(self.source.where(one.line) for one in estimator.starts)
            self.made.unread["inputs"] = (
                f"it is started {len(estimator.starts)} times ({places}); the first one's are here"
            )
        return estimator.starts[0] if estimator.starts else None

    def finished(self) -> Imported:
        """What was read, as plain values."""
        plain, left = _plain(self.made.values)
        for place, part in left:
            self.left(".".join(place), part)
        self.made.values = plain
        return self.made

    def seconds(self, key: str, unit: int, value: Any) -> None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self.made.set(key, value // unit if value % unit == 0 else round(value / unit, 7))
        elif value is not None:
            self.left(key, value)

    def mapping(self, key: str, value: Any) -> dict[str, Any]:
        if value is not None and not isinstance(value, dict):
            self.left(key, value)
        return value if isinstance(value, dict) else {}

    def left(self, key: str, value: Any, why: str = "") -> None:
        """Note what could not be read, or has no place in a config."""
        line = value.line if isinstance(value, (Unread, Call)) else 0
        try:
            text = str(value)
        except ValueError:  # Python writes at most 4,300 digits
            text = "a number with too many digits"
        if isinstance(value, Unread) and why == NO_KEY:
            why = ""
        secret = mentions_a_secret(f"{key}={text}" if isinstance(value, str) else text)
        if secret or (isinstance(value, (Unread, Call)) and names_a_secret(key.rpartition(".")[2])):
            text = REDACTED
        where = f" ({self.source.where(line)})" if line else ""
        shown = _one_line(text if len(text) <= 100 else text[:99] + "…")
        self.made.unread[_one_line(key)] = f"{shown}{where}{f': {why}' if why else ''}"


UNREAD: Any = object()
"""Stands for a value of which nothing is left."""


def _one_line(text: str) -> str:
    """A text from the script on one line, for a terminal and a comment."""
    return text if text.isprintable() else json.dumps(text)


def _plain(value: Any) -> tuple[Any, list[tuple[list[str], Any]]]:
    """A value as JSON and YAML hold it, without parts that were not read or that they cannot hold; and those parts, with their places."""
    if isinstance(value, dict):
        found, left = dict[str, Any](), list[tuple[list[str], Any]]()
        for key, part in value.items():
            word = (
                key if isinstance(key, str) else json.dumps(key) if isinstance(key, (int, float, type(None))) else None
            )
            plain, below = _plain(part) if word is not None and _is_scalar(word) else (UNREAD, [([], part)])
            left += [([str(key), *place], one) for place, one in below]
            if plain is not UNREAD:
                found[str(word)] = plain
        return (found if found or not value else UNREAD), left
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        left = [([str(number), *place], one) for number, (_, below) in enumerate(parts) for place, one in below]
        return ([plain for plain, _ in parts] if not left else UNREAD), left
    return (value, []) if _is_scalar(value) else (UNREAD, [([], value)])


def _is_scalar(value: Any) -> bool:
    """Whether YAML and JSON can hold a value as it is."""
    if isinstance(value, str):
        return not re.search("[\ud800-\udfff\ufffe\uffff]", value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool) or (isinstance(value, int) and value.bit_length() <= 64)


def lines(made: Imported, written: Callable[[Any], str]) -> Iterator[str]:
    """The config's lines, without its head.

    Args:
        written: renders a value on one line of YAML.
    """
    for key, value in made.values.items():
        if key in ("inputs", "hyperparameters", "metrics", "compute") and isinstance(value, dict) and value:
            yield f"{key}:"
            yield from (f"  {written(str(name))}: {written(part)}" for name, part in value.items())
        else:
            yield f"{key}: {written(value)}"
    if made.unread:
        yield "# Not read, since only the script knows it when it runs, or no config says it:"
        yield from (f"#   {key}: {text}" for key, text in made.unread.items())
    yield from (f"# Different: {text}." for text in made.notes)
