"""Two runs side by side: what an epoch takes and costs, the phases before and after, and whether a fix did what it promised."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from launcher.aws import catalog
from launcher.config.issues import mistake
from launcher.insight import page, pictures, summary, windows
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.findings import written
from launcher.record.records import write_atomically
from launcher.show.table import Table

PAUSES = "beside the steps: epochs' first batches, checkpoints, evaluations"
"""The training time outside usual steps."""


@dataclass(frozen=True)
class Result:
    """A row of the result table, which has the columns that KT published."""

    source: str
    spec: str
    """The GPU's name, or cpu."""
    devices: int
    """GPUs; on the CPU, training processes."""
    hours: float
    """Of training: steps, checkpoints and evaluations."""
    epochs: float
    hours_per_epoch: float
    reduction_ratio: float | None
    """Hours an epoch over those of the other run."""
    device_hours_per_epoch: float


@dataclass(frozen=True)
class Kept:
    """A fix from the first run's diagnosis that the second run applied, as advised or at least in that direction."""

    setting: str
    before: Any
    after: Any
    advised: Any
    expected: float | None
    at_most: float
    obtained: float


@dataclass(frozen=True)
class Comparison:
    """Two diagnosed runs: before and after. `print` shows it, a notebook too; `plot` writes its picture, `save_html` a page.

    >>> comparison = launcher.diagnose("quickstart-teacher", "quickstart-teacher")
    >>> comparison.speedup, comparison.changed()
    (1.0, [])
    >>> comparison.plot("before_and_after.svg").name
    'before_and_after.svg'
    """

    before: Diagnosis
    after: Diagnosis

    def results(self) -> list[Result]:
        """A row for each timed run; the ratio is to the last."""
        rows = [row for row in (_result(self.before), _result(self.after)) if row is not None]
        if len(rows) < 2:
            return rows
        return [
            Result(**{**asdict(row), "reduction_ratio": row.hours_per_epoch / rows[-1].hours_per_epoch}) for row in rows
        ]

    @property
    def speedup(self) -> float | None:
        """Images a second after, over before; None where a run was not timed."""
        before, after = (_images_per_second(run.evidence) for run in (self.before, self.after))
        return after / before if before and after else None

    def phases(self) -> list[tuple[str, float | None, float | None]]:
        """(phase, seconds a step before, after), then the whole step; seconds an image where the batches differ. None where a run lacks the
        phase."""
        tables = []
        for run in (self.before, self.after):
            batch = run.evidence.settings.get("global_batch_size")
            each = batch if self._batches_differ and isinstance(batch, int) else 1
            found = {name: seconds / each for name, seconds, _ in summary.phase_rows(run.evidence)}
            if run.evidence.step_seconds:
                found["step"] = run.evidence.step_seconds / each
            tables.append(found)
        names = summary.in_order({name: 0.0 for found in tables for name in found if name != "step"})
        return [(name, tables[0].get(name), tables[1].get(name)) for name in [*names, "step"]] if any(tables) else []

    @property
    def _batches_differ(self) -> bool:
        batches = [run.evidence.settings.get("global_batch_size") for run in (self.before, self.after)]
        return batches[0] != batches[1] and all(isinstance(batch, int) for batch in batches)

    def course(self) -> tuple[str, list[tuple[str, float | None, float | None]]]:
        """Where all of the training time goes.

        Returns:
            A unit, seconds per 1,000 images, or per 1,000 steps where a batch is not known; and (part, before, after): the phases of a
            usual step, what passed beside usual steps under PAUSES, and under "whole" all of it. None where a run was not timed.
        """
        runs = (self.before.evidence, self.after.evidence)
        batches = [evidence.settings.get("global_batch_size") for evidence in runs]
        known = all(isinstance(batch, int) for batch in batches)
        images_a_step: list[int] = [batch for batch in batches if isinstance(batch, int)] if known else [1, 1]
        tables: list[dict[str, float]] = []
        for evidence, images in zip(runs, images_a_step):
            steps = windows.steps_done(evidence.ranks[0]) if evidence.ranks else 0
            if not steps or not evidence.step_seconds or not evidence.training_seconds:
                tables.append({})
                continue
            each = 1000 / (steps * images)
            found = {
                name: seconds * steps * each
                for name, seconds, _ in summary.phase_rows(evidence)
                if name != "grad_sync"  # it lies within backward
            }
            whole = evidence.training_seconds * each
            found[PAUSES] = max(0.0, whole - evidence.step_seconds * steps * each)
            tables.append({**found, "whole": max(whole, sum(found.values()))})
        names = {name: 0.0 for found in tables for name in found if name not in (PAUSES, "whole")}
        order = [*summary.in_order(names), PAUSES, "whole"]
        rows = [(name, tables[0].get(name), tables[1].get(name)) for name in order]
        return f"seconds per 1,000 {'images' if known else 'steps'}", rows if any(tables) else []

    @property
    def _unit(self) -> tuple[str, float]:
        """Of the phases, and its factor from seconds."""
        return ("µs an image", 1e6) if self._batches_differ else ("ms a step", 1e3)

    def kept(self) -> list[Kept]:
        """The first run's fixes that the second applied, with the expected and the obtained speed-up."""
        found = []
        for finding in self.before.findings:
            fix = finding.fixes[0]
            if fix.setting is None or finding.gain is None or self.speedup is None:
                continue
            name = fix.setting.removeprefix("hyperparameters.")
            if name not in self.after.evidence.settings:
                continue
            before, after = self.before.evidence.settings.get(name), self.after.evidence.settings[name]
            if before != after and _towards(before, after, fix.value):
                gain = finding.gain
                found.append(Kept(fix.setting, before, after, fix.value, gain.expected, gain.at_most, self.speedup))
        return found

    def changed(self) -> list[tuple[str, Any, Any]]:
        """(setting, before, after) of every setting that differs."""
        first, second = self.before.evidence.settings, self.after.evidence.settings
        return [
            (name, first.get(name), second.get(name))
            for name in sorted({*first, *second})
            if first.get(name) != second.get(name)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "results": [asdict(row) for row in self.results()],
            "speedup": self.speedup,
            "fix_kept": [asdict(kept) for kept in self.kept()],
            "settings_changed": [{"setting": name, "before": a, "after": b} for name, a, b in self.changed()],
        }

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """(head, rows) of the result table, the phases, the operators and the settings that differ; without empty ones."""
        results = [
            [
                *(row.source, row.spec, str(row.devices), f"{row.hours:.4g}", f"{row.epochs:.4g}"),
                f"{row.hours_per_epoch:.4g}",
                "-" if row.reduction_ratio is None else f"{row.reduction_ratio:.2f}",
                f"{row.device_hours_per_epoch:.4g}",
            ]
            for row in self.results()
        ]
        unit, factor = self._unit
        phases = [
            [name, *("-" if value is None else f"{value * factor:.2f}" for value in (a, b)), _times(a, b)]
            for name, a, b in self.phases()
        ]
        settings = [[name, _short(a), _short(b)] for name, a, b in self.changed()]
        device_hours = (
            "GPU-hours an epoch"
            if any(run.evidence.on_gpu for run in (self.before, self.after))
            else "process-hours an epoch"
        )
        pairs = itertools.zip_longest(*(summary.operators(run.evidence, 5) for run in (self.before, self.after)))
        operators = [[f"{one[0][:50]} {one[2] * 100:.0f} %" if one else "-" for one in pair] for pair in pairs]
        found = [
            (
                ["run", "device", "number", "hours", "epochs", "hours an epoch", "reduction ratio", device_hours],
                results,
            ),
            (["phase", f"before, {unit}", f"after, {unit}", "after / before"], phases),
            (["operators that took longest before", "and after"], operators),
            (["setting", "before", "after"], settings),
        ]
        return [(head, rows) for head, rows in found if rows]

    def sentences(self) -> list[str]:
        """The speed-up, and whether fixes brought the expected one."""
        sentences = [] if self.speedup is None else [f"speed-up {self.speedup:.2f}, in images a second"]
        for kept in self.kept():
            expected = (
                f"at most {kept.at_most:.2f}"
                if kept.expected is None
                else f"{kept.expected:.2f} (at most {kept.at_most:.2f})"
            )
            sentences.append(
                f"{kept.setting} from {_short(kept.before)} to {_short(kept.after)} (advised: {_short(kept.advised)}): "
                f"expected speed-up {expected}, obtained {kept.obtained:.2f}"
            )
        return sentences

    def __str__(self) -> str:
        lines = [
            f"{name:<6}  {run.measurements.source}: {run.headline}"
            for name, run in (("before", self.before), ("after", self.after))
        ]
        for head, rows in self.tables():
            lines += ["", str(Table(head, rows))]
        return "\n".join([*lines, *([""] if self.sentences() else []), *self.sentences()])

    def __repr__(self) -> str:
        return f"<comparison of {self.before.measurements.source} and {self.after.measurements.source}>"

    def _repr_html_(self) -> str:
        heads = "".join(
            f"<p><b>{name}</b> {escape(run.measurements.source)}: {escape(run.headline)}</p>"
            for name, run in (("Before:", self.before), ("After:", self.after))
        )
        tables = "".join(f"<div class='scroll'>{Table(head, rows).html()}</div>" for head, rows in self.tables())
        sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences())
        return f"<div class='diagnosis'>{heads}{self._svg()}{tables}{sentences}</div>"

    def _svg(self) -> str:
        """Both runs' phases and cores; "" where no step was measured."""
        unit, course = self.course()
        if not course:
            return ""
        changed = "; ".join(f"{name}: {_short(a)} before, {_short(b)} after" for name, a, b in self.changed())
        runs = [("before", self.before.evidence), ("after", self.after.evidence)]
        return pictures.before_and_after(course, unit, changed if len(changed) <= 110 else "", runs)

    def plot(self, file: Path | str) -> Path:
        """Write both as one SVG picture: where the training time goes, and how busy the cores are.

        Raises:
            UserError: neither run measured its steps.
        """
        drawn = self._svg()
        if not drawn:
            raise mistake("plot", "no step of either run was measured", "compare two runs whose steps were")
        write_atomically(Path(file), drawn)
        return Path(file)

    def save_html(self, file: Path | str) -> Path:
        """One page: both runs side by side, then the charts of each."""
        path = Path(file)
        title = f"{self.before.measurements.source} and {self.after.measurements.source}"
        runs = [(run.evidence, run.report) for run in (self.before, self.after)]
        path.write_text(page.page(title, f"<h1>Before and after</h1>{self._repr_html_()}", runs), encoding="utf-8")
        return path


def _result(run: Diagnosis) -> Result | None:
    evidence = run.evidence
    epochs = epochs_done(evidence)
    if not epochs or not evidence.training_seconds:
        return None
    hours = evidence.training_seconds / 3600
    number = evidence.world_size or 1
    return Result(
        source=run.measurements.source,
        spec=_spec(evidence),
        devices=number,
        hours=hours,
        epochs=epochs,
        hours_per_epoch=hours / epochs,
        reduction_ratio=None,
        device_hours_per_epoch=hours / epochs * number,
    )


def epochs_done(evidence: Evidence) -> float | None:
    """Passes over the data in the measured steps; None where no step was measured.

    An epoch's steps follow from the number of training images where it is known. Else from the logged steps: step s of epoch e says
    that an epoch has at least s / e of them, and an epoch's last step says exactly that.
    """
    if not evidence.ranks:
        return None
    steps = evidence.ranks[0]
    images, batch = evidence.facts.get("training_images"), evidence.settings.get("global_batch_size")
    if isinstance(images, int) and isinstance(batch, int) and images >= batch:
        each: float = images // batch
    else:
        each = float(np.ceil(steps.step / np.maximum(steps.epoch, 1)).max())
    return windows.steps_done(steps) / each


def _images_per_second(evidence: Evidence) -> float | None:
    batch = evidence.settings.get("global_batch_size")
    if not evidence.training_seconds or not isinstance(batch, int):
        return 1 / evidence.step_seconds if evidence.step_seconds else None
    return batch * windows.steps_done(evidence.ranks[0]) / evidence.training_seconds


def _spec(evidence: Evidence) -> str:
    host = catalog.instance(str(evidence.facts.get("instance_type", "")))
    name = evidence.facts.get("device_name") or (host.gpu if host is not None else None)
    return str(name or ("GPU" if evidence.on_gpu else "cpu"))


def _towards(before: Any, after: Any, advised: Any) -> bool:
    """Whether a setting was changed as advised, or a number at least in that direction."""
    if isinstance(advised, dict) and isinstance(after, dict):
        return all(after.get(name) == value for name, value in advised.items())
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after, advised)):
        return bool((after - before) * (advised - before) > 0)
    return bool(after == advised)


def _times(first: float | None, second: float | None) -> str:
    return f"{second / first:.2f}" if first and second is not None else "-"


def _short(value: Any) -> str:
    text = written(value)
    return text if len(text) <= 40 else text[:37] + "..."
