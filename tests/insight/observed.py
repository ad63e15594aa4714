"""Turns planted measurements into those of a script that the observer watched: its files, with what it set up and where it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.insight.measurements import Measurements, read
from tests.insight.planted import plant, write

LOADER = {
    "kind": "setup",
    "of": "loader",
    "file": "train.py",
    "line": 42,
    "text": "loader = DataLoader(data, batch_size=args.batch, num_workers=args.workers)",
    "via": None,
    "values": {
        "id": 1,
        "role": "training",
        "batch_size": 32,
        "num_workers": 4,
        "pin_memory": False,
        "prefetch_factor": 2,
        "persistent_workers": False,
        "batches": 50,
        "dataset": {"class": "Food", "file": "food.py", "line": 12},
    },
}

PRECISIONS = {
    "fp32": {"autocast": None, "matmul_precision": "highest", "allow_tf32": False},
    "tf32": {"autocast": None, "matmul_precision": "high", "allow_tf32": True},
    "bf16": {"autocast": "bfloat16", "matmul_precision": "highest", "allow_tf32": False},
}


def setup(of: str, line: int, text: str, via: str | None = None, **values: Any) -> dict[str, Any]:
    """A `setup` line of train.py."""
    return {"kind": "setup", "of": of, "file": "train.py", "line": line, "text": text, "values": values, "via": via}


def loader(via: str | None = None, **values: Any) -> dict[str, Any]:
    """That of the training loader."""
    return {**LOADER, "via": via, "values": {**LOADER["values"], **values}}


def sampled(line: int, text: str, samples: int, phase: str | None = "forward", **values: Any) -> dict[str, Any]:
    """An entry of a `lines` line, of a hundred samples."""
    place = {"file": "train.py", "line": line, "text": text, "phase": phase, "samples": samples}
    return {**place, "package": None, "in_model": False, **values}


USUAL = (
    setup("optimizer", 20, "optimizer = SGD(model.parameters())", **{"class": "SGD"}),
    setup("model", 71, "out = model(images)", parameters=10, trainable=10, dtype="float32", **{"class": "ResNet"}),
    setup("backward", 72, "loss.backward()"),
    setup("step", 73, "optimizer.step()"),
    setup("checkpoint", 90, "torch.save(model.state_dict(), 'model.pt')"),
    setup("copy", 69, "images = images.to(device)"),
)  # fmt: skip


def observed(
    folder: Path, planted: dict[str, Any], *more: dict[str, Any], lines: list[dict[str, Any]] | None = None
) -> Measurements:
    """A planted run as it is read from the files that the observer would have written; its hosts are the planted ones.

    Args:
        planted: arguments of `plant`.
        more: `setup` lines instead of the usual ones of their kind.
        lines: entries of the `lines` line; those of rank N are N lines further down.
    """
    measured = plant(**planted)
    write(measured, folder)
    batch, workers = measured.settings["global_batch_size"], measured.settings["num_workers"]
    precision = PRECISIONS[measured.settings["precision"]]
    usual = [
        loader(num_workers=workers, batch_size=batch // len(measured.ranks)),
        setup("precision", 72, "loss.backward()", **precision),
        *USUAL,
    ]
    setups = [*more, *(one for one in usual if one["of"] not in {other["of"] for other in more})]
    for file in folder.rglob("timeline-*.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        events[0] |= {"observed": True, "settings": {}}
        for event in events:
            if event["kind"] == "steps":
                seconds = event["seconds"]
                forward = (seconds.pop(name, 0.0) for name in ("teacher_forward", "student_forward", "loss"))
                seconds["forward"] = sum(forward)
                event["extra"]["images_per_second"] = batch / seconds["step"]
        rank = events[0]["rank"]
        for stall in measured.stalls:
            if stall.rank == rank:
                events.append({name: getattr(stall, name) for name in ("kind", "step", "began", "seconds")})
        looked = {
            "kind": "lines",
            "samples": 100,
            "lines": [{**line, "line": line["line"] + rank} for line in lines or []],
        }
        file.write_text("".join(json.dumps(event) + "\n" for event in [events[0], *setups, *events[1:], looked]))
    return replace(read(str(folder)), source="observed", hosts=measured.hosts)
