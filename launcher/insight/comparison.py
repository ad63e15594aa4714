"""Two runs side by side: time and cost of an epoch, phases before and after, and whether a fix brought the expected speed-up."""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from launcher.aws import catalog
from launcher.config.issues import mistake
from launcher.insight import page, pictures, report_text, speed, summary, windows
from launcher.insight.control import Comparability, comparability
from launcher.insight.diagnosis import Diagnosis
from launcher.insight.evidence import Evidence
from launcher.insight.findings import percent
from launcher.insight.kept import Kept, apart, fixes_kept
from launcher.insight.length import common, epoch_steps, work_of_a_step
from launcher.insight.phases import labelled
from launcher.insight.ratio import CONFIDENCE, Ratio
from launcher.record.records import write_named
from launcher.show import html
from launcher.show.svg import Picture
from launcher.show.table import Table


@dataclass(frozen=True)
class Result:
    """A row of the result table, with the columns that KT published."""

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
    """Hours per epoch over those of the last row; None for a single row."""
    device_hours_per_epoch: float


@dataclass(frozen=True)
class Comparison:
    """Two diagnosed runs, before and after. `print` or a notebook shows them; `plot` writes a picture, `save_html` a page.

    >>> comparison = launcher.diagnose("quickstart-teacher", "quickstart-teacher")
    >>> comparison.speedup.value, comparison.changed()
    (1.0, [])
    >>> comparison.plot("before_and_after.svg").name
    'before_and_after.svg'
    """

    before: Diagnosis
    after: Diagnosis

    def results(self) -> list[Result]:
        """A row for each timed run whose epoch length is known; ratios are to the last row."""
        rows = [row for row in (_result(self.before), _result(self.after)) if row is not None]
        if len(rows) < 2:
            return rows
        return [
            Result(**{**asdict(row), "reduction_ratio": row.hours_per_epoch / rows[-1].hours_per_epoch}) for row in rows
        ]

    @functools.cached_property
    def _common(self) -> tuple[Evidence, Evidence]:
        """The part that both runs did, which is compared."""
        return common(self.before.evidence, self.after.evidence)

    @functools.cached_property
    def comparability(self) -> Comparability:
        """Whether the runs are comparable, judged by what no change between them can touch."""
        return comparability(self.before.evidence, self.after.evidence)

    @functools.cached_property
    def measured(self) -> Ratio | None:
        """Images per second after, over before (steps per second if a batch size is unknown): over all the training that both did, with
        first steps and pauses. None if a run was not timed."""
        return speed.measured(self.before.evidence, self.after.evidence)

    @functools.cached_property
    def speedup(self) -> Ratio | None:
        """What the change brought: `measured`, corrected if the machine was slower or busier in one of the runs. None if a run was not
        timed or the two cannot be compared."""
        return None if self.measured is None else self.comparability.speedup(self.measured)

    def phases(self) -> list[tuple[str, float | None, float | None]]:
        """(phase, seconds per step before, after), the whole step last, in the part that both runs did; seconds per image if the batch
        sizes differ. None if a run lacks the phase."""
        tables = []
        for evidence in self._common:
            each = self._per_step(evidence)
            found = {name: seconds / each for name, seconds, _ in summary.phase_rows(evidence)}
            if evidence.step_seconds:
                found["step"] = evidence.step_seconds / each
            tables.append(found)
        names = summary.in_order({name: 0.0 for found in tables for name in found if name != "step"})
        return [(name, tables[0].get(name), tables[1].get(name)) for name in [*names, "step"]] if any(tables) else []

    def _with_pauses(self) -> list[tuple[str, float | None, float | None]]:
        """The row for all of the training: pauses, and steps that took longer than usual, are shared among the steps."""
        means = []
        for evidence in self._common:
            each = self._per_step(evidence)
            steps = windows.steps_done(evidence.ranks[0]) if evidence.ranks else 0
            means.append(evidence.training_seconds / steps / each if steps and evidence.training_seconds else None)
        return [("step, all time counted", means[0], means[1])] if any(means) else []

    def _per_step(self, evidence: Evidence) -> int:
        """What the seconds of a run's step are divided by: its images if the batch sizes differ, else 1."""
        batch = evidence.settings.get("global_batch_size")
        return batch if self._batches_differ and isinstance(batch, int) else 1

    @property
    def _batches_differ(self) -> bool:
        batches = [run.evidence.settings.get("global_batch_size") for run in (self.before, self.after)]
        return batches[0] != batches[1] and all(isinstance(batch, int) for batch in batches)

    def course(self) -> tuple[str, list[tuple[str, float | None, float | None]]]:
        """Where all of the training time goes, in the part that both runs did.

        Returns:
            The unit, seconds per 1,000 images, or per 1,000 steps if a batch size is unknown; and (part, before, after): the phases of a
            usual step, the time outside usual steps as summary.PAUSES, and all of it as "whole". None if a run was not timed.
        """
        unit, work = work_of_a_step(*self._common)
        tables: list[dict[str, float]] = []
        for evidence, of_a_step in zip(self._common, work):
            found = summary.course(evidence)
            if not found:
                tables.append({})
                continue
            each = 1000 / (windows.steps_done(evidence.ranks[0]) * of_a_step)
            whole = max(evidence.training_seconds, sum(found.values()))
            tables.append({name: seconds * each for name, seconds in (*found.items(), ("whole", whole))})
        names = {name: 0.0 for found in tables for name in found if name not in (summary.PAUSES, "whole")}
        order = [*summary.in_order(names), summary.PAUSES, "whole"]
        rows = [(name, tables[0].get(name), tables[1].get(name)) for name in order]
        return f"seconds per 1,000 {unit}", rows if any(tables) else []

    @property
    def _unit(self) -> tuple[str, float]:
        """The unit of the phases, and its factor from seconds."""
        return ("µs an image", 1e6) if self._batches_differ else ("ms a step", 1e3)

    def kept(self) -> list[Kept]:
        """The first run's fixes that the second applied, with the expected and the obtained speed-up."""
        if self.measured is None:
            return []
        why = "too short to judge" if self.too_short else "" if self.speedup is not None else "not comparable"
        return fixes_kept(
            self.before.findings,
            self.before.evidence,
            self.after.evidence,
            None if why else self.speedup,
            f"not judged, since the runs are {why}",
            self._common[0],
        )

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
            "speedup": None if self.speedup is None or self.too_short else asdict(self.speedup),
            "too_short": self.too_short or None,
            "mfu": [run.evidence.mfu for run in (self.before, self.after)],
            "measured_speedup": None if self.measured is None else asdict(self.measured),
            "confidence": CONFIDENCE,
            "comparable": self.comparability.to_dict(),
            "fix_kept": [kept.to_dict() for kept in self.kept()],
            "settings_changed": [{"setting": name, "before": a, "after": b} for name, a, b in self.changed()],
        }

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """(head, rows) of the result table, the phases, the operators and the settings that differ; empty ones are left out."""
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
            [labelled(name), *("-" if value is None else f"{value * factor:.2f}" for value in (a, b)), _times(a, b)]
            for name, a, b in [*self.phases(), *self._with_pauses()]
        ]
        settings = [[name, *apart(a, b)] for name, a, b in self.changed()]
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
            (["phase of a usual step", f"before, {unit}", f"after, {unit}", "after / before"], phases),
            (["operators that took longest before", "and after"], operators),
            (["setting", "before", "after"], settings),
        ]
        return [(head, rows) for head, rows in found if rows]

    @property
    def too_short(self) -> str:
        """Lengths of the runs that are too short to give a speed; "" if both are long enough."""
        said = [(run.measurements.source, run.report.too_short) for run in (self.before, self.after)]
        return " and ".join(f"{source} has {length}" for source, length in said if length)

    @property
    def _untimed(self) -> str:
        """Which runs have no measured step, and why."""
        said = []
        for run in (self.before, self.after):
            if not run.evidence.ranks:
                why = report_text.incomplete(run.evidence) or run.measurements.not_measured.get("steps")
                said.append(f"{run.measurements.source} has no measured step{f' ({why})' if why else ''}")
        return " and ".join(dict.fromkeys(said))

    @property
    def _per(self) -> str:
        """What the speed-up counts, and over how much of it if the runs differ in length."""
        unit, each = work_of_a_step(*self._common)
        part, _ = self._common
        done = windows.steps_done(part.ranks[0]) * each[0]
        return f"in {unit} a second{'' if part is self.before.evidence else f' over the first {done:,.0f} of each run'}"

    def sentences(self) -> list[str]:
        """Whether the runs can be compared, the speed-up, and whether fixes brought the expected one."""
        if self.measured is None:
            return [f"no speed-up: {self._untimed}; compare runs whose steps were measured"]
        runs = self.before.evidence, self.after.evidence
        if short := self.too_short:
            return [
                f"too short to compare: {short}; as measured {self.measured}, {self._per}, which a longer run may reverse"
            ]
        if self.speedup is None:
            first = [
                self.comparability.sentence,
                f"measured: {self.measured}, {self._per}, due to the change and to other differences",
            ]
        else:
            no_range = ", too short for a range" if self.speedup.low is None else ""
            raw = f", as measured {self.measured}" if self.comparability.is_corrected else ""
            first = [f"speed-up {self.speedup}, {self._per}{no_range}{raw}; {self.comparability.sentence}"]
        more = speed.start_cost(*runs)
        utilised = [evidence.mfu for evidence in runs]
        return [
            *first,
            *([f"MFU {_share(utilised[0])} before, {_share(utilised[1])} after"] if any(utilised) else []),
            *([f"included: {more:.1f} s more until the first step"] if more else []),
            *map(str, self.kept()),
        ]

    def __str__(self) -> str:
        lines = [*self.sentences(), *([""] if self.sentences() else [])]
        lines += [
            f"{name:<6}  {run.measurements.source}: {run.headline}"
            for name, run in (("before", self.before), ("after", self.after))
        ]
        for head, rows in self.tables():
            lines += ["", str(Table(head, rows))]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<comparison of {self.before.measurements.source} and {self.after.measurements.source}>"

    @property
    def headline(self) -> str:
        """What the change brought, in a few words."""
        if self.measured is None:
            return "Before and after"
        if self.too_short:
            return "Too short to compare"
        if self.speedup is None:
            return "The runs are not comparable"
        return f"Speed-up {self.speedup}"

    def _repr_html_(self) -> str:
        return self._html(html.image)

    def _html(self, render: html.Renderer) -> str:
        sides = "".join(
            f"<div><b>{name}</b> <span class='about'>{escape(run.measurements.source)}</span><p>{escape(run.headline)}</p></div>"
            for name, run in (("Before", self.before), ("After", self.after))
        )
        tables = "".join(f"<div class='scroll'>{Table(head, rows).html()}</div>" for head, rows in self.tables())
        sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences())
        drawn = render(self.picture)
        return f"<div class='diagnosis'><h1>{escape(self.headline)}</h1><div class='sides'>{sides}</div>{drawn}{sentences}{tables}</div>"

    @property
    def picture(self) -> Picture:
        """Both runs' phases and cores as SVG, which a notebook shows as an image; "" if no step was measured."""
        unit, course = self.course()
        if not course:
            return Picture()
        changed = "; ".join("{}: {} before, {} after".format(name, *apart(a, b)) for name, a, b in self.changed())
        runs = [("before", self.before.evidence), ("after", self.after.evidence)]
        return pictures.before_and_after(course, unit, changed if len(changed) <= 110 else "", runs)

    def plot(self, file: Path | str) -> Path:
        """Write both as one SVG picture: where the training time goes, and how busy the cores are.

        Raises:
            UserError: neither run measured its steps.
        """
        drawn = self.picture
        if not drawn:
            raise mistake("plot", "no step of either run was measured", "compare two runs whose steps were")
        write_named(Path(file), drawn)
        return Path(file)

    def save_html(self, file: Path | str) -> Path:
        """One page: both runs side by side, then the charts of each."""
        path = Path(file)
        title = f"{self.before.measurements.source} and {self.after.measurements.source}"
        runs = [(run.evidence, run.report) for run in (self.before, self.after)]
        write_named(path, page.page(title, self._html(html.inline), runs))
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
    """Passes over the data in the measured steps; None if the length of one is unknown."""
    each = epoch_steps(evidence)
    return None if each is None else windows.steps_done(evidence.ranks[0]) / each


def _spec(evidence: Evidence) -> str:
    host = catalog.instance(str(evidence.facts.get("instance_type", "")))
    name = evidence.facts.get("device_name") or (host.gpu if host is not None else None)
    return str(name or ("GPU" if evidence.on_gpu else "cpu"))


def _share(value: float | None) -> str:
    return "not known" if value is None else percent(value)


def _times(first: float | None, second: float | None) -> str:
    return f"{second / first:.2f}" if first and second is not None else "-"
