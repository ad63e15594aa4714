"""requirements.txt of the source package: what the script imports and AWS's image lacks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping

from launcher.aws import catalog
from launcher.config.job import Job
from launcher.planner.source_package import SourceFile

FILE = "requirements.txt"
"""The container toolkit installs it before the script starts."""

SAME_MODULE = {"cv2": ("opencv-python", "opencv-contrib-python")}
"""A module that several packages provide. One of them is enough; two would overwrite each other's files."""


def complete(job: Job, files: list[SourceFile]) -> list[SourceFile]:
    """The files, with a requirements.txt if AWS's image lacks packages. The user's own requirements.txt stays as it is.

    Versions are those that this kit is tested with.
    """
    uri = job.image.uri if job.image is not None else None
    if uri is not None and catalog.image_facts(uri) is None:
        return files
    if any(file.path == FILE for file in files):
        return files
    needed = _needed(job, files)
    if not needed:
        return files
    text = "# Made by vision-launcher: what the script imports and the image lacks.\n"
    content = (text + "".join(f"{name}=={version}\n" for name, version in needed.items())).encode()
    return sorted([*files, SourceFile(FILE, None, len(content), content)], key=lambda file: file.path)


def timm_version(job: Job) -> str | None:
    """The version of timm that this kit's scripts import; None for an image that is not AWS's, which holds its own."""
    uri = job.image.uri if job.image is not None else None
    return None if uri is not None and catalog.image_facts(uri) is None else catalog.packages().pins["timm"]


def lacking(job: Job, files: list[SourceFile]) -> list[str]:
    """Lines that the user's own requirements.txt lacks: what the script imports and AWS's image does not hold."""
    uri = job.image.uri if job.image is not None else None
    own = next((file for file in files if file.path == FILE and file.source is not None), None)
    if own is None or (uri is not None and catalog.image_facts(uri) is None):
        return []
    text = own.read().decode("utf-8", "replace").lower()
    modules = catalog.packages().imported_as
    return [
        f"{name}=={version}"
        for name, version in _needed(job, files).items()
        if not any(other in text for other in (name, *SAME_MODULE.get(modules.get(name, name), ())))
    ]


def _needed(job: Job, files: list[SourceFile]) -> dict[str, str]:
    """Package -> version that the script imports and AWS's images lack."""
    packages = catalog.packages()
    imported = imported_modules(job.script, files)
    modules = {name: packages.imported_as.get(name, name) for name in packages.pins}
    needed = {
        name: version
        for name, version in packages.pins.items()
        if modules[name] in imported and not catalog.has_module(modules[name], _framework_version(job))
    }
    if job.source is None:  # of this kit's own scripts
        for setting, by_value in packages.on_request.items():
            given = job.hyperparameters.get(setting)
            needed |= by_value.get(given, {}) if isinstance(given, (bool, str)) else {}
        if job.hyperparameters.get("preprocessing") == "dali":
            needed |= dali_packages(job) or {}
    return dict(sorted(needed.items()))


def dali_packages(job: Job) -> Mapping[str, str] | None:
    """Packages that `preprocessing: dali` needs in one of AWS's images; None: no DALI for it."""
    version = _framework_version(job)
    about = _image_facts(job)
    return catalog.dali_packages(version, about.cuda if about is not None else None) if version else None


def _image_facts(job: Job) -> catalog.ImageFacts | None:
    """Facts in the address of the job's image; None if it is not one of AWS's."""
    return catalog.image_facts(job.image.uri) if job.image is not None and job.image.uri is not None else None


def _framework_version(job: Job) -> str | None:
    """The PyTorch version of the job's image, if the job says it."""
    about = _image_facts(job)
    given = job.image.framework_version if job.image is not None else None
    return about.framework_version if about is not None else given


def imported_modules(script: str, files: list[SourceFile]) -> set[str]:
    """Top-level modules that a script imports, itself or through other source files."""
    by_path = {file.path: file for file in files}
    found: set[str] = set()
    waiting, seen = [script], set()
    while waiting:
        path = waiting.pop()
        if path in seen or path not in by_path:
            continue
        seen.add(path)
        for name in _imports(path, by_path[path].read()):
            parts = name.split(".")
            names = [".".join(parts[: depth + 1]) for depth in range(len(parts))]  # a.b.c runs a and a.b first
            local = [file for each in names for file in _paths(each, script, by_path)]
            waiting += local
            if not local:
                found.add(name.partition(".")[0])
    return found


@functools.lru_cache(maxsize=1024)  # a study plans many jobs of the same files
def _imports(path: str, source: bytes) -> tuple[str, ...]:
    """Every name that a Python file imports, at any depth. Relative names start at the source folder."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # validation reports a script's syntax error
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [module] if module else []
            found += [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
    return tuple(found)


def _paths(name: str, script: str, by_path: Mapping[str, SourceFile]) -> Iterator[str]:
    """The source files that an imported name may be: beside the script, or at the top."""
    folder = script.rpartition("/")[0]
    for base in {folder, ""}:
        place = f"{base}/{name.replace('.', '/')}".lstrip("/")
        yield from (path for path in (f"{place}.py", f"{place}/__init__.py") if path in by_path)
