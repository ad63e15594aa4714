"""The checkpoints of a run: when they are written, which stay, which one a run resumes from, and whether it may.

Rank 0 alone writes and reads; what it reads goes to every rank, so that a host with an empty folder resumes as well.
`checkpoint_folder` has the format of one checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from training.distributed.world import World
from training.engine import checkpoint_folder
from training.engine.checkpoint_folder import OWN, REPLACED, SHARED, WRITING, Damaged
from training.engine.snapshot import snapshot
from training.runtime import accelerator
from training.runtime.reporting import write_line

FORMAT = 3
"""Of what the files hold; a checkpoint of another one is refused."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as one rank gets it; tensors are on the CPU."""

    step: int
    shared: Any
    own: dict[str, torch.Tensor]
    """What this rank saved; where there were more or fewer ranks, the mean of what all of them did, of floating-point numbers alone."""
    same_world: bool
    """Whether there were as many; else `reseed` gives every rank new random numbers."""


class Checkpoints:
    """The checkpoints of a run in its folder.

    Args:
        folder: made where it is missing. None, on every rank: nothing is saved, and nothing found.
        fingerprint: settings that a checkpoint must have been saved with, so that this run may go on from it; JSON-ready.
        keep: how many stay. There is room for one more while it is written.
        writing: as `checkpoint_writing` of the settings.
        log: writes a line to the log; rank 0 alone calls it.
    """

    def __init__(
        self,
        folder: Path | None,
        world: World,
        *,
        fingerprint: Mapping[str, Any] | None = None,
        keep: int = 2,
        writing: str = "auto",
        log: Callable[[str], None] = write_line,
    ):
        self._folder, self._world, self._keep, self._log = folder, world, keep, log
        self._fingerprint = json.loads(json.dumps(fingerprint or {}))  # as it comes back: a tuple is a list there
        self._decided: dict[str, int] = {}
        self._saved: int | None = None
        self._in_background = writing == "background" or (writing == "auto" and accelerator.is_gpu(world.device))
        # at the interpreter's end it finishes what it has begun
        self._writer = ThreadPoolExecutor(1, "checkpoint", accelerator.make_current, (world.device,))
        self._writing: Future[str] | None = None
        self._damaged: list[Path] = []

    def belong_to(self, sources: Mapping[str, str]) -> None:
        """Beside its settings, what a checkpoint must have been saved with: images and a teacher. Before `load`.

        Args:
            sources: by name, what tells each from others.
        """
        self._fingerprint |= sources

    def decide(self, name: str, value: int) -> None:
        """Note what this run found by itself, so that one that goes on from its checkpoints takes the same. Before `save`."""
        self._decided[name] = value

    def decided(self, name: str) -> int | None:
        """What a run before with as many ranks noted by this name; None where there is no such checkpoint. A collective."""
        found = self._world.on_rank_zero(lambda: self._noted(name))
        value: int | None = json.loads(self._from_first(json.dumps(found).encode()))
        return value

    def _noted(self, name: str) -> int | None:
        """By the newest manifest that can be read: whether its checkpoint is whole `load` finds out."""
        for place in checkpoint_folder.places(self._folder):
            with contextlib.suppress(Damaged, AttributeError):
                manifest = checkpoint_folder.read_manifest(place)
                if manifest.get("world_size") == self._world.size:
                    value = manifest.get("decided", {}).get(name)
                    return value if isinstance(value, int) else None
        return None

    @property
    def enabled(self) -> bool:
        """Whether there is a folder, so that anything is saved."""
        return self._folder is not None

    def save(self, step: int, shared: Any, own: Mapping[str, torch.Tensor], *, required: bool = False) -> None:
        """Save a step. A collective: every rank calls it after the same step.

        The new checkpoint appears whole or not at all, and only then the oldest goes. Where the disk fails, the ones before
        stay, a warning is logged and training continues: losing steps later is better than losing all of them now.
        In the background a thread writes a copy in main memory while training goes on, at most one behind.
        `load` comes first in every process: checkpoints of later steps are taken for those that it passed over, and removed.

        Args:
            step: optimizer steps done.
            shared: from rank 0, None on the others: dicts, lists and tuples of tensors, numbers, texts and None.
            own: this rank's tensors, of the same names, shapes and types on every rank.
            required: the job ends with this one, so a failure is reported: it raises.

        Raises:
            OSError: on every rank, where the checkpoint is required and could not be written.
            TypeError: `shared` holds something that could not be read again.
        """
        if self._folder is None:
            return
        files = {
            SHARED: shared,
            OWN: {name: self._world.gather_rows(own[name].detach()[None]) for name in sorted(own)},
        }
        if not required:
            self._warn(self._begun(step, files) if self._world.is_first else "")
            return
        # however slow the disk is
        trouble = self._world.on_rank_zero(lambda: self._begun(step, files) or self._settled())
        trouble = self._world.broadcast_bytes((trouble or "").encode() if self._world.is_first else None).decode()
        if trouble:
            raise OSError(f"{trouble}. A job that resumes here repeats the steps since the previous checkpoint")

    def _begun(self, step: int, files: Mapping[str, Any]) -> str:
        """Have a step written, unless it is: in the background later, of a copy. What went wrong, then with the one before."""
        trouble = self._settled()
        if step == self._saved:
            return trouble
        checkpoint_folder.refuse_unreadable(files[SHARED], "shared")
        if not self._in_background:
            return self._written(step, files)
        self._warn(trouble)
        self._writing = self._writer.submit(self._written, step, snapshot(files, self._world.device))
        return ""

    def finish(self) -> None:
        """Wait until the last one is on the disk."""
        self._warn(self._settled())

    def _warn(self, trouble: str) -> None:
        if trouble:
            fix = f"make room for {self._keep + 1} checkpoints (compute.volume_gb), or keep fewer"
            self._log(f"WARNING: {trouble}. Earlier checkpoints are kept and training continues; {fix}")

    def _settled(self) -> str:
        """What went wrong with the one that is still being written, once it is."""
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else ""

    def _written(self, step: int, files: Mapping[str, Any]) -> str:
        """Write a whole checkpoint, then remove old ones; what went wrong."""
        assert self._folder is not None
        manifest = {
            "format": FORMAT,
            "step": step,
            "world_size": self._world.size,
            "fingerprint": self._fingerprint,
            "decided": self._decided,
            "torch": torch.__version__,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        try:
            checkpoint_folder.write(self._folder, step, files, manifest)
            self._remove_all_but_the_newest(step)
        except OSError as error:
            checkpoint_folder.remove(self._folder / WRITING)
            return f"no checkpoint of step {step} in {self._folder}: {error.strerror or error}"
        self._saved = step
        return ""

    def load(self) -> Loaded | None:
        """The newest checkpoint that is whole, the same one on every rank; None where there is none. A collective.

        Damaged ones, which a lost host or a copy to S3 that was cut short leaves, are skipped and logged.

        Raises:
            ValueError: on every rank: it was saved with other settings or images, or by another version of these scripts.
        """
        if self._folder is None:
            return None
        manifest, contents = self._world.on_rank_zero(self._newest_good) or (None, {})
        manifest = json.loads(self._from_first(json.dumps(manifest).encode()))
        if manifest is None:
            return None
        self._saved = manifest["step"]
        if manifest.get("format") != FORMAT:
            raise ValueError(
                f"the checkpoint of step {manifest['step']} in {self._folder} was written by another version of these scripts: resume "
                "with that version, or start over with another `checkpoints` in the config or without that folder"
            )
        different = _differences(manifest["fingerprint"], self._fingerprint)
        if different:
            raise ValueError(
                f"the checkpoint of step {manifest['step']} in {self._folder} belongs to another job: {'; '.join(different)}. "
                "Resume with its settings, or start over with another `checkpoints` in the config or without that folder"
            )
        shared, rows = (
            torch.load(io.BytesIO(self._from_first(contents.pop(name, b""))), map_location="cpu", weights_only=True)
            for name in (SHARED, OWN)
        )
        same_world = manifest["world_size"] == self._world.size
        if same_world:
            own = {name: row[self._world.rank].clone() for name, row in rows.items()}
        else:
            own = {name: row.double().mean(0).to(row.dtype) for name, row in rows.items() if row.is_floating_point()}
        return Loaded(manifest["step"], shared, own, same_world)

    def _from_first(self, data: bytes) -> bytes:
        return self._world.broadcast_bytes(data if self._world.is_first else None)

    def _remove_all_but_the_newest(self, step: int) -> None:
        """Remove the steps before beyond `keep`; and what is damaged or lies after this step, which nobody goes on from."""
        assert self._folder is not None
        places = checkpoint_folder.places(self._folder)
        before = [place for place in places if checkpoint_folder.step_of(place) < step and place not in self._damaged]
        kept = {checkpoint_folder.place_of(self._folder, step), *before[: self._keep - 1]}
        for place in [*(place for place in places if place not in kept), self._folder / REPLACED]:
            checkpoint_folder.remove(place)
        self._damaged = []

    def _newest_good(self) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
        """The manifest of the newest whole checkpoint and what its files hold; (None, {}) where there is none."""
        complaints = []
        for place in checkpoint_folder.places(self._folder):
            try:
                manifest, contents = checkpoint_folder.read(place)
            except Damaged as damage:
                complaints.append(f"checkpoint {place.name} is damaged ({damage})")
                self._damaged.append(place)
                continue
            for complaint in complaints:
                self._log(f"{complaint}, using {place.name}")
            return manifest, contents
        for complaint in complaints:
            self._log(f"{complaint}, and no other is intact: starting from the first step")
        return None, {}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints, at most five settings of it."""
    names = [name for name in sorted({**there, **here}) if there.get(name) != here.get(name)]
    shown = [f"{name} is {_shown(there, name)} there and {_shown(here, name)} here" for name in names[:5]]
    return shown + ([f"and {len(names) - 5} more"] if len(names) > 5 else [])


def _shown(values: Mapping[str, Any], name: str) -> str:
    text = json.dumps(values[name]) if name in values else "absent"
    return text if len(text) <= 60 else text[:57] + "..."
