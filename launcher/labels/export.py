"""A label bank as plain tensors, or as a Hugging Face dataset: one file per view.

Memory holds one decoded view at a time, or for a dataset a part of one. A decoded answer for pixels is some thirty times its record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.config.issues import mistake
from launcher.labels.bank import Bank
from launcher.show.text import counted

Labels = Mapping[str, np.ndarray]
"""The labels of a view: `image` int32 (labels,), the images' indices; `logits` float32 (labels, kept); if only the largest are kept,
also `classes` int32 (labels, kept) and `residual` float32 (labels,), the log-sum-exp of the logits of all other classes; if features are
kept, `features` float32 (labels, width) or (labels, rows, columns, width). For a bank of pixels, see PixelFormat.tensors."""

CARD = "README.md"


@dataclass
class Exported:
    """How many labels an export has, and why it lacks others."""

    bank: Bank
    labels: int = 0
    damaged: int = 0
    """Records that were written, but are not whole."""
    absent: int = 0
    """Not made yet, or of images that cannot be read."""

    def whole_records(self, view: int) -> Iterator[Labels]:
        """All whole records of a view, part by part, counted."""
        left = self.bank.images_per_view
        for piece in self.bank.pieces(view):
            held, damaged = int(piece.held.sum()), int((piece.written & ~piece.held).sum())
            self.labels, self.damaged, left = self.labels + held, self.damaged + damaged, left - held - damaged
            found: dict[str, np.ndarray] = self.bank.records.tensors(piece.records[piece.held])
            yield {"image": piece.images[piece.held].astype(np.int32), **found}
        self.absent += max(0, left)

    @property
    def lacking(self) -> str:
        """`; 1 damaged record left out, 3 absent`; empty if it has all."""
        parts = [f"{counted(self.damaged, 'damaged record')} left out"] if self.damaged else []
        parts += [f"{self.absent:,} absent"] if self.absent else []
        return f"; {', '.join(parts)}" if parts else ""


def export(bank: Bank, target: Path, kind: str) -> str:
    """Write a bank's labels to a new folder.

    Args:
        kind: one of KINDS.

    Returns:
        A summary for people, with the labels that the bank lacks.

    Raises:
        UserError: the folder is not empty, a package is missing, or a view's file is cut off.
    """
    if target.is_dir() and any(target.iterdir()):
        raise mistake("TARGET", f"{target} is not empty", "name a new folder")
    wrong = [found for view in bank.views if (found := bank.wrong_size(view))]
    wrong += [f"{name} is missing or empty, and was complete" for name in bank.lost]
    if wrong:
        raise mistake("FOLDER", wrong[0], f"launcher labels verify {bank.folder} names all damage")
    folder, save = target / ("data" if kind == HUGGING_FACE else ""), KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    exported = Exported(bank)
    for view in bank.views:
        save(folder / f"view-{view:04d}", view, exported.whole_records(view))
    if kind == HUGGING_FACE:
        (target / CARD).write_text(_card(bank, exported.lacking), encoding="utf-8")
    views = counted(len(bank.views), "view")
    return f"{target}: {counted(exported.labels, 'label')} of {views} as {kind}{exported.lacking}"


def _joined(parts: Iterable[Labels]) -> Labels:
    pieces = [*parts]
    return (
        pieces[0]
        if len(pieces) == 1
        else {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    )


def _as_npz(file: Path, _view: int, parts: Iterable[Labels]) -> None:
    np.savez(file.with_suffix(".npz"), **_joined(parts))  # type: ignore[arg-type]  # allow_pickle, which mypy sees there, is newer than numpy 2.0


def _as_safetensors(file: Path, _view: int, parts: Iterable[Labels]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise mistake("--as", "the package safetensors is missing", "pip install safetensors, or take npz") from error
    labels = _joined(parts)
    # it writes an array's memory as is, whatever its order
    save_file({name: np.ascontiguousarray(values) for name, values in labels.items()}, file.with_suffix(".safetensors"))


def _as_json_lines(file: Path, view: int, parts: Iterable[Labels]) -> None:
    with open(file.with_suffix(".jsonl"), "w", encoding="utf-8") as written:
        for labels in parts:
            for row in range(len(labels["image"])):  # one at a time: as Python numbers they take eight times the memory
                one = {name: values[row].tolist() for name, values in labels.items()}
                written.write(json.dumps({"view": view, **one}) + "\n")


def _card(bank: Bank, lacking: str) -> str:
    """The dataset card, with what the bank lacks; its header tells `datasets` where the rows are."""
    about = bank.manifest["created"]
    others = "" if not bank.records.top_k else "; `residual` is the log-sum-exp of the logits of all other classes"
    names = "".join(f"- {index}: {name}\n" for index, name in enumerate(about.get("class names", [])))
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*.jsonl\n---\n"
        f"The answers of {about.get('teacher', 'a teacher')} for {len(bank.views)} views of {bank.images_per_view:,} images, by the image's"
        f" index{lacking}. Each row has {bank.records.about()}{others}.\n\n"
        f"SHA-256 of the teacher: {bank.identity.get('teacher weights')}; of the images: {bank.identity.get('data')}; "
        f"of how they were varied: {bank.identity.get('transform')}.\n\n{names}"
    )


HUGGING_FACE = "huggingface"

KINDS: Mapping[str, Callable[[Path, int, Iterable[Labels]], None]] = {
    "npz": _as_npz,
    "safetensors": _as_safetensors,
    HUGGING_FACE: _as_json_lines,
}
"""By name: writes the labels of a view, which come in parts, to a file named without suffix."""
