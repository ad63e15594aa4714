"""A config's values as they are found in calls of the SDK, and what could not be read: the part that both versions share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from launcher.config.issues import mistake
from launcher.config.redaction import REDACTED, holds_a_secret, is_secret, mentions_a_secret
from launcher.sdk_import.objects import Call, Symbol, Unread
from launcher.sdk_import.source import Source

HOUR, MINUTE = 3600, 60

FILE_SYSTEMS = {"FSxLustre": "fsx", "EFS": "efs"}


IN_THE_SCRIPT = "what seems to be a secret stays in the script: a config's `secrets` name it"


@dataclass
class Imported:
    """What could be read of an estimator."""

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
    """Puts what calls of the SDK say into a config."""

    def __init__(self, source: Source):
        self.source = source
        self.made = Imported()

    def script(self, entry: Any, folder: Any, call: Call) -> None:
        """`script` and `source`. The SDK takes a script without a folder from where it lies.

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
        if isinstance(folder, str) and folder.startswith("s3://"):
            self.left("source", Unread(folder, call.line), "in S3; a config's source is a folder on this machine")
            folder = None
        elif folder is not None and not isinstance(folder, str):
            self.left("source", folder)
            folder = None
        if not isinstance(entry, str):
            self.left("script", entry)
            return
        path = PurePosixPath(entry)
        if folder is None:
            self.made.values |= {"script": path.name, "source": str(path.parent)}
        else:
            self.made.values |= {"script": str(path), "source": folder}

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
            return {"folder": given.argument("path", 0)}  # a run uploads it
        if isinstance(given, str):
            return self.address(given)
        self.left(f"inputs.{name}", given)
        return None

    def address(self, text: str) -> dict[str, Any]:
        return {"folder": text.removeprefix("file://")} if text.startswith("file://") else {"s3": text}

    def s3_input(self, name: str, given: Call) -> dict[str, Any] | None:
        made = self.channel(name, given.argument("s3_data", 0))
        if made is None:
            return None
        words = {"content_type": "content_type", "input_mode": "mode", "attribute_names": "attributes"}
        words |= {
            "compression": "compression",
            "record_wrapping": "record_wrapper",
            "instance_groups": "instance_groups",
        }
        for word, value in given.keywords.items():
            if word == "distribution":
                made |= {"sharded": True} if value == "ShardedByS3Key" else {}
            elif word == "s3_data_type":
                made |= {"data_type": value} if value != "S3Prefix" else {}
            elif word == "shuffle_config" and isinstance(value, Call):
                made["shuffle_seed"] = value.argument("seed", 0)
            elif word in words and not isinstance(value, (Unread, Call)):
                made |= {words[word]: value} if value is not None else {}
            elif word != "s3_data":
                self.left(f"inputs.{name}.{words.get(word, word)}", value)
        return made

    def file_system(self, name: str, given: Call) -> dict[str, Any] | None:
        order = ("file_system_id", "file_system_type", "directory_path", "file_system_access_mode", "content_type")
        found = {word: given.argument(word, place) for place, word in enumerate(order)}
        kind = FILE_SYSTEMS.get(str(found["file_system_type"]))
        if kind is None or not isinstance(found["file_system_id"], str) or not isinstance(found["directory_path"], str):
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
        """Set a key to a value that was read; note what was not. Secrets stay in the script.

        Args:
            name: of a hyperparameter, which may have dots of its own.
        """
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
        """Variables of the script; one that seems to hold a secret is to come from the environment of who starts the job."""
        for name, value in self.mapping("environment", given).items():
            if isinstance(value, str) and is_secret(str(name), value):
                self.made.values.setdefault("secrets", {})[str(name)] = "env"
                self.made.notes.append(f"{name} is taken from your environment: its value stays in the script")
            elif isinstance(value, (Unread, Call, Symbol)):
                self.left(f"environment.{name}", value)
            else:
                self.made.values.setdefault("environment", {})[str(name)] = str(value)

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
        """Note what could not be read, or no config says."""
        line = value.line if isinstance(value, (Unread, Call)) else 0
        text = value.name if isinstance(value, Symbol) else str(value)
        if mentions_a_secret(f"{key}={text}" if isinstance(value, str) else text) and text != REDACTED:
            text = REDACTED
        where = f" ({self.source.where(line)})" if line else ""
        self.made.unread[key] = f"{text if len(text) <= 100 else text[:99] + '…'}{where}{f': {why}' if why else ''}"


UNREAD: Any = object()
"""In the place of a value of which nothing is left."""


def _plain(value: Any) -> tuple[Any, list[tuple[list[str], Any]]]:
    """A value as JSON has it, without what could not be read; and those parts, with their places in it."""
    if isinstance(value, dict):
        found, left = dict[str, Any](), list[tuple[list[str], Any]]()
        for key, part in value.items():
            plain, below = _plain(part)
            left += [([str(key), *place], one) for place, one in below]
            if plain is not UNREAD:
                found[str(key)] = plain
        return (found if found or not value else UNREAD), left
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        left = [([str(number), *place], one) for number, (_, below) in enumerate(parts) for place, one in below]
        return ([plain for plain, _ in parts] if not left else UNREAD), left
    if value is None or isinstance(value, (str, bool, int, float)):
        return value, []
    return UNREAD, [([], value)]


def lines(made: Imported, written: Callable[[Any], str]) -> Iterator[str]:
    """The config's lines, without its head.

    Args:
        written: a value on one line of YAML.
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
