"""A teacher's files: where they lie in a channel, and their weights by name."""

from __future__ import annotations

import pickle
import tarfile
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from training.models.export import WEIGHTS

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Of weights files; .bin is the Hugging Face hub's older one."""

ARCHIVE = ".tar.gz"


def member_folders(channel: Path, unpacked: Path) -> dict[str, Path]:
    """The folders of a channel that hold a teacher each, by a name for messages, in the order of these names.

    The channel holds one teacher: a model.tar.gz as a run leaves it, its content, or one weights file; or it holds several: an
    archive each, or a subfolder each that holds one of these.

    Args:
        unpacked: an empty folder into which archives are unpacked.

    Raises:
        ValueError: an archive is damaged, or holds files that lie outside of it.
    """
    entries = [entry for entry in sorted(channel.iterdir()) if not entry.name.startswith(".")]
    archives = [entry for entry in entries if entry.name.endswith(ARCHIVE)]
    if archives:
        return {archive.name: _unpack(archive, unpacked / archive.name) for archive in archives}
    folders = [entry for entry in entries if entry.is_dir()]
    if not folders or any(entry.suffix in SUFFIXES for entry in entries):
        return {channel.name: channel}
    inside = {folder.name: member_folders(folder, unpacked / folder.name) for folder in folders}
    return {
        outer if len(members) == 1 else f"{outer}/{name}": place
        for outer, members in inside.items()
        for name, place in members.items()
    }


def weights_file(folder: Path) -> Path:
    """A teacher's only weights file, or of several the one that an export calls model.safetensors.

    Raises:
        ValueError: there is none, or there are several of other names.
    """
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    files = [file for file in sorted(folder.iterdir()) if file.suffix in SUFFIXES and not file.name.startswith(".")]
    if len(files) != 1:
        raise ValueError(
            f"the channel teacher holds {len(files)} weights files ({', '.join(file.name for file in files) or 'none'}): it needs "
            f"one model.tar.gz, {', '.join(SUFFIXES)}; for an ensemble, one in a subfolder each"
        )
    return files[0]


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """A file's weights by name, without the prefixes that DDP and torch.compile leave; of a checkpoint, the EMA's if it has them.

    Raises:
        ValueError: the file is damaged, or holds other things than weights, which could run code.
    """
    read = load_file if file.suffix == ".safetensors" else partial(torch.load, map_location="cpu", weights_only=True)
    try:
        state = read(file)
    except pickle.UnpicklingError as error:
        fix = "save the state dict alone: torch.save(model.state_dict(), FILE)"
        raise ValueError(f"{file.name} is not a weights-only file, and no other kind is loaded: {fix}") from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{file.name} is damaged: copy it again ({_first_line(error)})") from error
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


def _unpack(archive: Path, target: Path) -> Path:
    """The folder into which an archive's files were unpacked."""
    target.mkdir(parents=True)
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                # extractall's own filter="data" came with Python 3.11.4; Debian 12 has 3.11.2
                place = (target / member.name).resolve()
                if not place.is_relative_to(target.resolve()):
                    raise ValueError(
                        f"{archive.name} holds {member.name}, which points outside it: use an archive that a run wrote"
                    )
                content = opened.extractfile(member) if member.isfile() else None
                if content is not None:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive.name} is damaged: copy it again ({_first_line(error)})") from error
    return target


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
