"""Files of trained models: where they are in a channel, and their weights by name. A damaged file is refused, never loaded."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from training.models.export import DIGEST, WEIGHTS, hash_weights

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of weights files; .bin is the Hugging Face hub's older one."""

ARCHIVE = ".tar.gz"

PIECE = 1 << 20
"""Bytes that are unpacked at once."""

MAX_RATIO, SMALL = 20, 64 << 20
"""An archive may unpack to 20 times its size, or to 64 MiB. gzip shrinks weights by a tenth, text tenfold, zeros a thousandfold."""


def member_folders(channel: Path, unpacked: Path) -> dict[str, Path]:
    """The folders of a channel that hold one model each, keyed by the name for messages and sorted by it.

    One model is a run's model.tar.gz, its content, or a weights file. Several models are one archive each, or one subfolder
    each that holds one of these.

    Args:
        unpacked: an empty folder for the content of archives.

    Raises:
        ValueError: an archive is damaged, unpacks to more than its limit, or holds files that point outside it.
    """
    entries = [entry for entry in sorted(channel.iterdir()) if not entry.name.startswith(".")]
    archives = [entry for entry in entries if entry.name.endswith(ARCHIVE)]
    if archives:
        return {archive.name: unpack(archive, unpacked / archive.name) for archive in archives}
    folders = [entry for entry in entries if entry.is_dir()]
    if not folders or any(entry.suffix in SUFFIXES for entry in entries):
        return {channel.name: channel}
    inside = {folder.name: member_folders(folder, unpacked / folder.name) for folder in folders}
    return {
        outer if len(members) == 1 else f"{outer}/{name}": place
        for outer, members in inside.items()
        for name, place in members.items()
    }


def weights_file(folder: Path, channel: str = "teacher") -> Path:
    """A model's weights file: model.safetensors, or the only one.

    Args:
        channel: the one that the folder came from, for messages.

    Raises:
        ValueError: there is none, or there are several of other names.
    """
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    files = [file for file in sorted(folder.iterdir()) if file.suffix in SUFFIXES and not file.name.startswith(".")]
    if len(files) != 1:
        raise ValueError(
            f"the channel {channel} holds {len(files)} weights files ({', '.join(file.name for file in files) or 'none'}): it needs "
            f"one model.tar.gz, {', '.join(SUFFIXES)}{'; for an ensemble, one in a subfolder each' if channel == 'teacher' else ''}"
        )
    return files[0]


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """A file's weights by name, without the prefixes of DDP and torch.compile; for a checkpoint, its EMA's if it has them.

    Raises:
        ValueError: the file is damaged, or holds more than weights, which can run code.
    """
    try:
        state = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    except pickle.UnpicklingError as error:
        fix = "save the state dict alone: torch.save(model.state_dict(), FILE)"
        raise ValueError(f"{file.name} is not a weights-only file, the only kind that is loaded: {fix}") from error
    except (SafetensorError, RuntimeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{file.name} is damaged: copy it again from where it was saved ({_first_line(error)})"
        ) from error
    for key in ("state_dict_ema", "state_dict", "model_ema", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{file.name} holds no state dict: save one with torch.save(model.state_dict(), FILE)")
    prefixes = ("module.", "_orig_mod.")
    while any(name.startswith(prefixes) for name in state):
        state = {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in state.items()}
    return state


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        known = (opened.metadata() or {}).get(DIGEST)
    if known is not None:
        found = hashlib.sha256()
        hash_weights(found, state)
        if found.hexdigest() != known:
            raise OSError(f"its weights have the SHA-256 {found.hexdigest()}, its header says {known}")
    return state


def _read_torch(file: Path) -> object:
    if zipfile.is_zipfile(file):  # torch does not verify its checksums
        with zipfile.ZipFile(file) as opened:
            _require_small(file, sum(member.file_size for member in opened.infolist()))
            damaged = opened.testzip()
        if damaged is not None:
            raise OSError(f"{damaged} in it does not match its checksum")
    return torch.load(file, map_location="cpu", weights_only=True)


class _Archive(gzip.GzipFile):
    """A gzip file that cannot be read beyond its limit."""

    def __init__(self, file: Path, limit: int | None):
        super().__init__(file)
        self._file, self._limit = file, limit

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        _require_small(self._file, self.tell(), self._limit)
        return piece


def unpack(archive: Path, target: Path, limit: int | None = None) -> Path:
    """The new folder that an archive's files were unpacked into.

    Args:
        limit: bytes that it may unpack to. None: what MAX_RATIO and SMALL allow.

    Raises:
        ValueError: it is damaged, unpacks to more than its limit, or holds files that point outside it.
    """
    target.mkdir(parents=True)
    try:
        with _Archive(archive, limit) as opened:
            with tarfile.open(fileobj=opened, mode="r|", bufsize=PIECE) as members:
                for member in members:
                    _unpack_member(members, member, target)
            while opened.read(PIECE):  # gzip verifies its checksum at the end; tarfile stops before
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        fix = "copy it again from the run that wrote it, and check it with gzip -t"
        raise ValueError(f"{archive.name} is damaged: {fix} ({_first_line(error)})") from error
    return target


def _require_small(archive: Path, size: int, limit: int | None = None) -> None:
    """Raise a ValueError for an archive that unpacks to more than its limit.

    Args:
        size: bytes that it unpacks to, in all or so far.
        limit: as `unpack` takes it.
    """
    allowed = max(SMALL, MAX_RATIO * archive.stat().st_size) if limit is None else limit
    if size > allowed:
        why = f", {MAX_RATIO} times its size or {SMALL:,}" if limit is None else ""
        raise ValueError(
            f"{archive.name} unpacks to more than {allowed:,} bytes{why}, which no archive of a run does: use one that a run or "
            "torch.save wrote, or unpack it and give the folder"
        )


def _unpack_member(members: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write a regular file below the folder that is named after its archive; nothing else is unpacked."""
    # extractall's filter="data" came with Python 3.11.4; Debian 12 has 3.11.2
    place = (target / member.name).resolve()
    if not place.is_relative_to(target.resolve()):
        raise ValueError(f"{target.name} holds {member.name}, which points outside it: use an archive that a run wrote")
    content = members.extractfile(member) if member.isfile() else None
    if content is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "wb") as file:
            shutil.copyfileobj(content, file, PIECE)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
