"""Defaults for every job: role, region, output, image, network and tags, from a user's file and a project's.

A config's own value wins, then a profile's, then one outside profiles; at each level the project's file comes before the user's. The
placeholders in this kit's configs (a role, a bucket of documentation) are not values of your own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.config import placeholders, yaml_file
from launcher.config.issues import Issue, UserError, did_you_mean
from launcher.config.job import Job
from launcher.config.job_issues import as_written, problems
from launcher.config.redaction import REDACTED, is_secret, mentions_a_secret
from launcher.config.secret_shapes import names_a_secret
from launcher.config.sections import A_PROFILE_NAME, PROFILE_NAME
from launcher.config.yaml_file import Config

KEYS = ("role", "region", "output", "image", "network", "tags")
"""What a file of defaults may give: what a team's jobs on SageMaker have in common."""

MERGED = ("network", "tags")
"""Keys whose mappings are merged key by key. An image is one thing: a version of AWS's, or an address."""

PROFILES = "profiles"
"""The key under which a file keeps further defaults by name."""

OFF = "LAUNCHER_DEFAULTS"
"""If this variable is `off`, as the SageMaker emulator sets it, there are no defaults."""

PROJECT_FILE = "launcher-defaults.yaml"


@dataclass(frozen=True)
class Default:
    """One default, and where it is set."""

    key: str
    """Dotted: role, network.subnets, tags.team."""
    value: Any
    """Never null: a key without a value is no default."""
    origin: str
    """The file as people name it, the profile, if it belongs to one, and the line: `defaults.yaml, profile dev (line 3)`."""


def user_file() -> Path:
    """Your own defaults, for all projects: $XDG_CONFIG_HOME/vision-launcher/defaults.yaml, or below ~/.config.

    https://specifications.freedesktop.org/basedir-spec/latest/

    Raises:
        UserError: there is no home directory.
    """
    given = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(given):  # a relative path is to be ignored
        return Path(given) / "vision-launcher" / "defaults.yaml"
    try:
        return Path.home() / ".config" / "vision-launcher" / "defaults.yaml"
    except RuntimeError:
        fix = "set HOME or XDG_CONFIG_HOME to a folder of yours"
        raise UserError([Issue(key="HOME", found="no home directory", fix=fix)]) from None


def project_file() -> Path:
    """A project's defaults: launcher-defaults.yaml in the current folder or, inside a git repository, in the nearest one above it.

    If there is none yet, where it would be: the current folder.
    """
    here, found = Path.cwd(), None
    for folder in (here, *here.parents):
        if found is None and _is_there(folder / PROJECT_FILE):
            found = folder / PROJECT_FILE
        if _is_there(folder / ".git"):
            return found or here / PROJECT_FILE
    return here / PROJECT_FILE  # outside of a repository, no folder above belongs to the project


def read(profile: str | None = None) -> list[Default]:
    """The defaults in force, at most one per key, sorted by key.

    Args:
        profile: the name of a profile of one of the files; None: none.

    Raises:
        UserError: every mistake in both files, or neither has the profile.
    """
    found, issues = _in_force(profile)
    if issues:
        raise UserError(issues, "the defaults")
    return found


def profile_names() -> list[str]:
    """The profiles of both files, in alphabetical order."""
    return sorted({name for file in _files()[0] for name in _profiles(file)})


def complete(
    values: Mapping[str, Any], examples: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, str], list[Issue]]:
    """A config's values, with defaults for the keys that they lack.

    Args:
        examples: keys whose values are placeholders and count as not given.

    Returns:
        The values, dotted key -> origin of each default filled in, and the mistakes in the files. Defaults without a
        mistake are still filled in, so that the rest of the job can be checked.
    """
    filled, origins = dict(values), dict[str, str]()
    profile = values.get("profile")
    found, issues = _in_force(profile if isinstance(profile, str) and re.match(PROFILE_NAME, profile) else None)
    for default in found:
        name, _, below = default.key.partition(".")
        if below:
            section = filled.get(name, {})
            if not isinstance(section, dict) or below in section:  # no mapping: a mistake, and reported as one
                continue
            filled[name] = {**section, below: default.value}
        elif name not in filled or name in examples:
            filled[name] = default.value
        else:
            continue
        origins[default.key] = default.origin
    return filled, origins, issues


def examples_in(values: Mapping[str, Any]) -> set[str]:
    """The keys of a config's file that hold this kit's placeholders; the region beside two of them is one too."""
    found = {key for key in ("role", "output") if placeholders.is_of_this_kit(key, values.get(key))}
    return found | ({"region"} if len(found) == 2 else set())


def _in_force(profile: str | None) -> tuple[list[Default], list[Issue]]:
    """The defaults without a mistake, sorted by key; and every mistake."""
    if os.environ.get(OFF) == "off":  # a profile means nothing then
        return [], []
    files, issues = _files()
    issues += [issue for file in files for issue in check(file)]
    known = sorted({name for file in files for name in _profiles(file)})
    if profile is not None and not issues and profile not in known:
        issues.append(_no_profile(profile, known))
    layers = [_layer(file, None) for file in files]
    layers += [_layer(file, profile) for file in files if profile in _profiles(file)]
    in_force = {default.key: default for layer in layers for default in layer}
    return sorted(in_force.values(), key=lambda default: default.key), issues


def parsed(text: str, source: str) -> Config:
    """A file of defaults, which may be empty. Raises UserError if it is not YAML."""
    try:
        return yaml_file.parse(text, source)
    except yaml_file.Empty:
        return Config(source, {})
    except yaml_file.NoMapping as error:
        fix = "write `key: value` lines, for example region: us-west-2"
        valid = f"a mapping with {', '.join(KEYS)}"
        raise UserError([replace(one, valid=valid, fix=fix) for one in error.issues]) from None
    except UserError as error:
        named = [
            one if one.key.startswith(source) else replace(one, key=f"{source}: {one.key}") for one in error.issues
        ]
        raise UserError(named) from None


def check(file: Config) -> Iterator[Issue]:
    """Every mistake in a file of defaults."""
    profiles = file.values.get(PROFILES)
    given = {key: value for key, value in file.values.items() if key != PROFILES}
    yield from _check(file, "", given)
    if profiles is not None and not isinstance(profiles, dict):
        yield Issue(
            key=f"{file.source}: {file.where(PROFILES)}",
            found=as_written(profiles),
            valid="defaults by the profile's name",
            fix="write profiles: {NAME: {region: us-west-2}}",
        )
    for name, values in _profiles(file).items():
        prefix = f"{PROFILES}.{name}"
        if not re.match(PROFILE_NAME, name) or is_secret("", name):
            shown = f"{PROFILES}.{REDACTED}" if mentions_a_secret(name) else file.where(prefix)
            yield Issue(
                key=f"{file.source}: {shown}", found="no name of a profile", valid=A_PROFILE_NAME, fix="rename it"
            )
        elif isinstance(values, dict):
            yield from _check(file, f"{prefix}.", values)
        elif values is not None:
            yield Issue(
                key=f"{file.source}: {file.where(prefix)}",
                found=as_written(values),
                valid=f"a mapping with {', '.join(KEYS)}",
                fix=f"write under {name} one key: value on each line",
            )


def name_of(file: Path) -> str:
    """A file as people name it: below the current folder, or below ~."""
    if file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    home = os.path.expanduser("~")
    return f"~/{file.relative_to(home)}" if home != "~" and file.is_relative_to(home) else str(file)


def _files() -> tuple[list[Config], list[Issue]]:
    """The files that are there, the user's first; and the mistakes of those that are not YAML."""
    if os.environ.get(OFF) == "off":
        return [], []
    found, issues = list[Config](), list[Issue]()
    for place in (user_file, project_file):
        try:
            file = place()
        except UserError:  # a machine without a home needs none of its own
            continue
        if _is_there(file):
            try:
                found.append(parsed(yaml_file.text_of(file), name_of(file)))
            except UserError as error:
                issues += error.issues
    return found, issues


def _is_there(file: Path) -> bool:
    """Whether a file or a link is there. False if this user may not look."""
    try:
        return file.exists() or file.is_symlink()
    except OSError:
        return False


def _profiles(file: Config) -> dict[str, Any]:
    given = file.values.get(PROFILES)
    return given if isinstance(given, dict) else {}


def _layer(file: Config, profile: str | None) -> Iterator[Default]:
    """The defaults of one file, outside profiles or in one."""
    values = file.values if profile is None else _profiles(file)[profile] or {}
    prefix = "" if profile is None else f"{PROFILES}.{profile}."
    of = "" if profile is None else f", profile {profile}"

    def made(key: str, value: Any) -> Iterator[Default]:
        if value is not None:
            line = next((file.lines[at] for at in _upwards(prefix + key) if at in file.lines), None)
            yield Default(key, value, f"{file.source}{of}{f' (line {line})' if line else ''}")

    if not isinstance(values, dict):
        return
    known: dict[str, Any] = {key: values[key] for key in KEYS if values.get(key) is not None}
    wrong = {issue.key.split(" ")[0].split(".")[0] for issue in problems(Config(file.source, _as_a_job(known)))}
    for key in (key for key in known if key not in wrong):
        if key in MERGED:
            for below, value in known[key].items():
                yield from made(f"{key}.{below}", value)
        else:
            yield from made(key, known[key])


def _as_a_job(values: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults as the values of an otherwise complete config."""
    return {"name": "defaults", "script": "script.py", **values}


def _upwards(key: str) -> Iterator[str]:
    """A dotted key, and its parents: what an alias or `<<` gives has no line of its own."""
    parts = key.split(".")
    yield from (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))


def _check(file: Config, prefix: str, values: Mapping[str, Any]) -> Iterator[Issue]:
    """The mistakes in one mapping of defaults, whose keys are below a prefix in the file."""

    def where(key: str) -> str:
        return f"{file.source}: {file.where(prefix + key)}"

    fields = [*KEYS, *([PROFILES] if not prefix else [])]
    for key in (key for key in values if key not in KEYS):
        hidden = key in ("secrets", "environment") or names_a_secret(key)
        belongs = key in Job.model_fields and not hidden
        yield Issue(
            key=where(key),
            found="no default: defaults hold no secrets" if hidden else "no default" if belongs else "unknown key",
            valid=", ".join(fields),
            fix="write it in each job's config" if belongs else did_you_mean(key, fields),
        )
    known = {key: value for key, value in values.items() if key in KEYS and value is not None}
    for key, value in known.items():
        below = value if isinstance(value, dict) else {}
        secret = next((name for name in below if names_a_secret(str(name)) and key == "tags"), None)
        if secret is not None or mentions_a_secret(str(value)):
            yield Issue(
                key=where(key if secret is None else f"{key}.{secret}"),
                found="what seems to be a secret; defaults hold none",
                fix="remove it; a job's `secrets` say where a secret is read from",
            )
    lines = {key.removeprefix(prefix): line for key, line in file.lines.items() if key.startswith(prefix)}
    for issue in problems(Config(file.source, _as_a_job(known), lines)):
        yield replace(issue, key=f"{file.source}: {prefix}{issue.key}")


def _no_profile(name: str, known: list[str]) -> Issue:
    return Issue(
        key="profile",
        found=f"{name}: no such profile",
        valid=", ".join(known) or "none: no file of defaults has profiles",
        fix=did_you_mean(name, known, f"make it: launcher defaults profile={name} region=us-west-2"),
    )
