"""The diagnosis of a run: its findings and their evidence, as text, HTML and JSON."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.insight import page, report_text, servers, start_up, summary, utilisation
from launcher.insight.evidence import Evidence
from launcher.insight.findings import Finding
from launcher.insight.measurements import Measurements
from launcher.insight.probe import Probe, tested
from launcher.insight.report import Report
from launcher.insight.rules.table import judge
from launcher.record.records import write_named


@dataclass(frozen=True)
class Diagnosis:
    """What makes a run slow, and the evidence. `print` or a notebook shows it; `save_html` writes a page with charts.

    >>> diagnosis = launcher.diagnose("quickstart-teacher")
    >>> advice = [(finding.title, str(finding.fixes[0])) for finding in diagnosis.findings]
    >>> "data_wait" in diagnosis.to_dict()["phases"]
    True
    """

    measurements: Measurements
    probe: Probe | str | None = None
    """What a probe of the run measured, or why it could not; None: no probe."""

    @functools.cached_property
    def evidence(self) -> Evidence:
        return Evidence(self.measurements)

    @functools.cached_property
    def report(self) -> Report:
        found = judge(self.evidence)
        return found if self.probe is None else tested(found, self.evidence, self.probe)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Urgent ones first, then by share of the training time, largest first; risks last."""
        return self.report.findings

    @property
    def headline(self) -> str:
        return report_text.headline(self.evidence, self.report)

    def __str__(self) -> str:
        return report_text.text(self.evidence, self.report)

    def __repr__(self) -> str:
        return f"<diagnosis of {self.measurements.source}: {self.headline}>"

    def _repr_html_(self) -> str:
        return page.fragment(self.evidence, self.report)

    def save_html(self, file: Path | str) -> Path:
        """Write one self-contained page with charts; it needs no network."""
        path = Path(file)
        title = f"{self.measurements.source}: {self.headline}"
        write_named(path, page.page(title, "", [(self.evidence, self.report)]))
        return path

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        evidence = self.evidence
        return {
            "source": self.measurements.source,
            "headline": self.headline,
            "too_short": self.report.too_short,
            "findings": [finding.to_dict() for finding in self.findings],
            "looked_for_and_not_found": list(self.report.not_found),
            "does_not_apply": [{"what": what, "why": why} for what, why in self.report.not_applicable],
            "not_measured": [asdict(missing) for missing in self.report.not_measured],
            "step_seconds": evidence.step_seconds,
            "utilisation": utilisation.to_dict(evidence),
            "start": {
                "seconds": evidence.facts.get("seconds_to_first_step"),
                "parts": dict(start_up.parts(evidence)),
            },
            "phases": {
                name: {"seconds": seconds, "share": share} for name, seconds, share in summary.phase_rows(evidence)
            },
            "operators": [
                {"name": name, "seconds": seconds, "share": share}
                for name, seconds, share in summary.operators(evidence, 20)
            ],
            "script": self._script_to_dict(),
            "servers": self._servers_to_dict(),
            "use": [asdict(use) for use in summary.uses(evidence)],
            "sampled": self.measurements.sampled,
            "could_not_be_read": list(self.measurements.unreadable),
            "probe": self._probe_to_dict(),
        }

    def _servers_to_dict(self) -> dict[str, Any] | None:
        """What the hosts that make the images did, in the whole run and during usual steps; None: there are none."""
        counts, usual = servers.happened(self.evidence), servers.served(self.evidence)
        if counts is None:
            return None
        return {**asdict(counts), "usual": None if usual is None else asdict(usual)}

    def _script_to_dict(self) -> dict[str, Any] | None:
        """What the observer saw; None for the kit's own scripts."""
        script = self.measurements.script
        if script is None:
            return None
        return {
            "framework": script.framework,
            "set_up": [asdict(part) for part in script.parts],
            "lines": [asdict(line) for line in script.lines],
        }

    def _probe_to_dict(self) -> dict[str, Any] | None:
        if self.probe is None:
            return None
        answer = self.report.probe
        assert answer is not None
        answered = {"title": answer.title, "sentences": list(answer.sentences)}
        return {**answered, **({"failed": self.probe} if isinstance(self.probe, str) else self.probe.to_dict())}
