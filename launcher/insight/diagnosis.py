"""A run's measurements explained: the verdicts, and what they rest on, for people and for machines."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.insight import page, report, summary
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Verdict
from launcher.insight.measurements import Measurements
from launcher.insight.probe import Probe, tested
from launcher.insight.rules import Judgement, judge


@dataclass(frozen=True)
class Diagnosis:
    """What holds a run up, and how that is known. `print` shows it, a notebook too; `save_html` makes a page with charts.

    >>> diagnosis = launcher.diagnose("quickstart-teacher")
    >>> advice = [(verdict.title, str(verdict.cures[0])) for verdict in diagnosis.verdicts]
    >>> "data_wait" in diagnosis.to_dict()["phases"]
    True
    """

    measurements: Measurements
    probe: Probe | str | None = None
    """What a probe of the run measured, or why it could not; None: none was asked for."""

    @functools.cached_property
    def evidence(self) -> Evidence:
        return Evidence(self.measurements)

    @functools.cached_property
    def judgement(self) -> Judgement:
        found = judge(self.evidence)
        return found if self.probe is None else tested(found, self.evidence, self.probe)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Ranked: what takes most of the training time first, risks last."""
        return self.judgement.verdicts

    @property
    def headline(self) -> str:
        return report.headline(self.evidence, self.judgement)

    def __str__(self) -> str:
        return report.text(self.evidence, self.judgement)

    def __repr__(self) -> str:
        return f"<diagnosis of {self.measurements.source}: {self.headline}>"

    def _repr_html_(self) -> str:
        return page.fragment(self.evidence, self.judgement)

    def save_html(self, file: Path | str) -> Path:
        """One page with charts, which needs no other file and no network."""
        path = Path(file)
        title = f"{self.measurements.source}: {self.headline}"
        path.write_text(page.page(title, "", [(self.evidence, self.judgement)]), encoding="utf-8")
        return path

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        evidence = self.evidence
        return {
            "source": self.measurements.source,
            "headline": self.headline,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "looked_for_and_not_found": list(self.judgement.not_found),
            "does_not_apply": [{"what": what, "why": why} for what, why in self.judgement.not_applicable],
            "not_measured": [asdict(missing) for missing in self.judgement.not_measured],
            "step_seconds": evidence.step_seconds,
            "phases": {
                name: {"seconds": seconds, "share": share} for name, seconds, share in summary.phase_rows(evidence)
            },
            "operators": [
                {"name": name, "seconds": seconds, "share": share}
                for name, seconds, share in summary.operators(evidence, 20)
            ],
            "use": [asdict(use) for use in summary.uses(evidence)],
            "sampled": self.measurements.sampled,
            "probe": self._probe_to_dict(),
        }

    def _probe_to_dict(self) -> dict[str, Any] | None:
        if self.probe is None:
            return None
        answer = self.judgement.probe
        assert answer is not None
        told = {"title": answer.title, "sentences": list(answer.sentences)}
        return {**told, **({"failed": self.probe} if isinstance(self.probe, str) else self.probe.to_dict())}
