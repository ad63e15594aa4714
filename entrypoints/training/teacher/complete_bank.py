"""A complete label bank stands in for a teacher that is not available here; its manifest says whose answers they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from training.data.batches import TrainingBatches
from training.distributed.world import World
from training.teacher.bank_identity import identity_of, require_same
from training.teacher.cache import TeacherCache
from training.teacher.label_bank import IDENTITY, MANIFEST, ViewFile, digest_of, read_manifest, view_file
from training.teacher.logit_records import RecordLayout

OF_THE_TEACHER = ("teacher weights", "dtype")
"""Parts of a bank's identity taken from the bank itself, as there is no teacher to compare them with."""

TRIED = 1000
"""Among up to this many images without an answer, those that need one are counted exactly."""

CLASS_NAMES = "class names"
"""Under `created` in the manifest: the classes, in the order of the logits."""

FIX = "change these to the bank's values, or give a bank made with this job's images and settings"

FILL = (
    "launcher label fills it if the teacher is available; or a new run without teacher_cache.complete and with the channel teacher "
    "computes what is missing"
)


class CompleteBank:
    """Read-only answers of a teacher that is not available here.

    Attributes:
        cache: gives the logits of batches; it never calls the teacher once `require_answers` has passed.
    """

    def __init__(
        self,
        where: Path,
        *,
        parts: Mapping[str, str],
        about: Mapping[str, Any],
        images: int,
        layout: RecordLayout,
        views: int,
        world: World,
        stand_in: Callable[[int], int],
        drawn: int,
    ):
        """A collective.

        Args:
            where: this host's own folder, or one that all share.
            parts: of the identity, except OF_THE_TEACHER.
            about: "class names" of the data, and "transform", everything that its hash stands for.
            images, layout, views, stand_in, drawn: as TeacherCache takes them.

        Raises:
            ValueError: the folder holds no bank, or one for other images, views or classes, or that keeps other numbers; the message
                names every difference.
        """
        identity, problem = identity_of(parts, images, layout), None
        try:
            identity, self._created = _opened(where, identity, about)
        except (ValueError, OSError) as error:
            problem = error
        if world.any(problem is not None):  # together: no rank waits for one that has left
            raise problem or ValueError("another process cannot use its label bank; its own message says why")
        self.cache = TeacherCache(where, identity, layout, images, views, world, stand_in, drawn)
        self._identity = identity

    def about(self) -> dict[str, Any]:
        """The teacher's entry in result.json and the model's card."""
        return {
            "model": self._created.get("teacher"),
            "digest": self._identity.get("teacher weights"),
            "precision": self._identity.get("dtype"),
            "answers": "a complete label bank; no teacher was loaded",
            "label_bank": str(self.cache.where),
            "label_bank_digest": digest_of(self.cache.where),
        }

    def summary(self) -> str:
        """Log line."""
        about, cache = self.about(), self.cache
        return (
            f"label bank {cache.where}: it has all answers that this run needs, of {about['model']} in {about['precision']}, "
            f"SHA-256 {about['digest']}; no teacher is loaded or measured"
        )

    def require_answers(self, batches: TrainingBatches, steps: int) -> None:
        """Refuse a bank that lacks an answer for a view that the run draws. A collective, before the first step.

        Args:
            batches: what the run draws.
            steps: optimizer steps of the run.

        Raises:
            ValueError: answers are missing, or a file is damaged; the message names the views, how many answers each lacks, and the fix.
        """
        world, lacking, some = self.cache.world, list[tuple[int, str]](), False
        for view, images in _drawn(batches, steps):
            if world.is_first_on_host:
                try:
                    count = self._lacking(view, images)
                    lacking += [(view, f"{count:,} of {len(images):,}")] if count else []
                except (ValueError, OSError) as error:
                    lacking.append((view, str(error)))
            some = world.any(bool(lacking))  # after each view, so that no rank waits for all of them
        if some:
            raise ValueError(
                f"teacher_cache.complete says that the label bank in {self.cache.where} has every answer, but it lacks some that this "
                f"run needs: {'; '.join(_by_view(lacking))}. {FILL}"
                if lacking
                else "a label bank lacks answers that this run needs; the message of another process names them"
            )

    def _lacking(self, view: int, images: np.ndarray) -> int:
        """How many of these distinct images lack an answer. A broken image has none of its own and needs none."""
        with contextlib.ExitStack() as stack:
            file, path = None, view_file(self.cache.where, view)
            if path.is_file():
                opened = ViewFile(path, self.cache.images, self.cache.layout.size, False)
                file = stack.enter_context(contextlib.closing(opened))
            return self.cache.missing.count(file, view, images, TRIED)


def _opened(
    where: Path, identity: Mapping[str, Any], about: Mapping[str, Any]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """A bank's identity and the `created` of its manifest, if they match what the run asks for.

    Raises:
        ValueError: as CompleteBank.
    """
    if not (where / MANIFEST).is_file():
        raise ValueError(
            f"{where} holds no label bank (no {MANIFEST}), but teacher_cache.complete needs a complete one: {FILL}"
        )
    manifest = read_manifest(where)
    there, created = manifest[IDENTITY], manifest.get("created", {})
    if CLASS_NAMES not in created:
        raise ValueError(
            f"the label bank in {where} does not name its classes (`created`, {CLASS_NAMES!r} in {MANIFEST}), and there is no teacher that "
            "does: add them there, in the order of the logits, or give the channel teacher"
        )
    whole = {**identity, **{name: there.get(name) for name in OF_THE_TEACHER}, CLASS_NAMES: about[CLASS_NAMES]}
    compared = {**manifest, IDENTITY: {**there, CLASS_NAMES: created.get(CLASS_NAMES)}}
    require_same(where, compared, whole, about, FIX)
    return there, created


def _drawn(batches: TrainingBatches, steps: int) -> Iterator[tuple[int, np.ndarray]]:
    """Each view that a run draws, with its distinct images, int64 (images,), ascending."""
    epochs, each = -(-steps // len(batches)), batches.global_batch_size // batches.together
    for first in range(
        1, min(epochs, batches.views or epochs) + 1, batches.together
    ):  # a visit to each image after the other
        drawn = []
        for epoch in range(first, min(first + batches.together, epochs + 1)):
            left = min(len(batches), steps - (epoch - 1) * len(batches))
            drawn.append(batches.indices(epoch)[: left * each])
        images = np.unique(np.concatenate(drawn))
        for view in batches.views_of(first):
            yield view, images


def _by_view(lacking: Sequence[tuple[int, str]]) -> Iterator[str]:
    """What each view lacks; consecutive views that lack the same are named together."""
    for (what, _), group in groupby(enumerate(lacking), key=lambda one: (one[1][1], one[1][0] - one[0])):
        views = [view for _, (view, _) in group]
        yield f"view {views[0]}: {what}" if len(views) == 1 else f"views {views[0]} to {views[-1]}: {what} each"
