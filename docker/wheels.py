"""Downloads the wheels that a base image's Python lacks, on the building machine and with its pip settings.

    docker run --rm --interactive --entrypoint python BASE - <base_packages.py | python wheels.py FOLDER NAME==VERSION …

Standard input lists the base image's packages (base_packages.py). It downloads the named packages, and those of their requirements
that the base lacks or has in an older version. Versions come from .ci/constraints.txt for Python 3.11 and newer; for an older
Python they are the newest. AWS's own builds of torch are never replaced.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).parents[1] / ".ci/constraints.txt"
OF_THE_BASE = ("torch", "torchvision")
CV2 = ("opencv-python-headless", "opencv-python")
"""Packages with the module cv2. The base's own stays: another version may want another numpy than the base's torch."""
OLDEST_GLIBC = 17
"""manylinux_2_17 is the oldest platform of current wheels."""


def main() -> None:
    folder, *requirements = sys.argv[1:]
    base = json.load(sys.stdin)
    missing = lacking(requirements, base)
    if missing:
        pip("download", "-qq", "--no-deps", "--dest", folder, *platform_options(base), *missing)
    print("wheels: " + (", ".join(missing) or "none, the base has " + ", ".join(requirements)))


def lacking(requirements: list[str], base: dict[str, Any]) -> list[str]:
    """NAME==VERSION of each package that the base lacks for the requirements."""
    installed = {canonicalize_name(name): version for name, version in base["packages"].items()}
    environment = {"python_version": base["python"], "platform_machine": base["machine"], "extra": ""}
    found: dict[str, str] = {}
    asked = [Requirement(text) for text in requirements]
    while asked:
        new = []
        for requirement in asked:
            name = canonicalize_name(requirement.name)
            if name in found or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            if name in CV2 and any(other in installed for other in CV2):
                continue
            if name in installed and requirement.specifier.contains(installed[name], prereleases=True):
                continue
            if name in OF_THE_BASE:
                sys.exit(
                    f"needed: {requirement}; the base has {installed.get(name, 'none')}. Use another TRAINING_BASE"
                )
            new.append(requirement)
        asked = []
        for metadata in resolved(new, base) if new else []:
            found[canonicalize_name(metadata["name"])] = f"{metadata['name']}=={metadata['version']}"
            asked += [Requirement(text) for text in metadata.get("requires_dist", [])]
    return sorted(found.values())


def resolved(requirements: list[Requirement], base: dict[str, Any]) -> list[dict[str, Any]]:
    """The metadata of what pip would install for these requirements without their dependencies."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = ["install", "-qq", "--dry-run", "--ignore-installed", "--no-deps", "--target", folder]
        command += ["--report", str(report), *platform_options(base)]
        if tuple(int(number) for number in base["python"].split(".")) >= (3, 11):
            command += ["--constraint", str(CONSTRAINTS)]
        names = [f"{each.name}{each.specifier}" for each in requirements]
        pip(*command, *names)
        return [each["metadata"] for each in json.loads(report.read_text())["install"]]


def pip(*arguments: str) -> None:
    """Run this Python's pip, which prints its own errors."""
    if subprocess.run([sys.executable, "-m", "pip", *arguments]).returncode:
        sys.exit("pip could not get the wheels for this base")


def platform_options(base: dict[str, Any]) -> list[str]:
    """pip options that select wheels for the base's Python and C library."""
    newest = int(base["glibc"].split(".")[1])
    names = [f"manylinux_2_{minor}_{base['machine']}" for minor in range(newest, OLDEST_GLIBC - 1, -1)]
    names.append(f"manylinux2014_{base['machine']}")
    options = ["--only-binary", ":all:", "--python-version", base["python"]]
    return options + [text for name in names for text in ("--platform", name)]


if __name__ == "__main__":
    main()
