"""What a run writes to its log."""

from __future__ import annotations

import io
import sys

import pytest
from training.runtime.reporting import Reporter, write_line


@pytest.mark.parametrize(("encoding", "line"), [("utf-8", "é \\udcff\n"), ("ascii", "\\xe9 \\udcff\n")])
def test_a_name_that_the_log_cannot_encode_is_written_with_escapes(monkeypatch, encoding, line):
    """As of a file whose name is no UTF-8, where the log is strict."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors="strict"))
    write_line("é \udcff")
    assert written.getvalue() == line.encode(encoding)


def test_a_metrics_file_that_cannot_be_written_ends_no_training(tmp_path, capsys):
    reporter = Reporter(tmp_path, active=True)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    for step in (1, 2):
        reporter.metrics(1, 1, step, 2, {"loss": 0.5})
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("epoch")] == [
        f"epoch 1/1 step {step}/2 loss 0.5000" for step in (1, 2)
    ]
    [reported] = [line for line in lines if not line.startswith("epoch")]
    assert reported.startswith("metrics.jsonl lacks step 1, and maybe later ones: ") and "Is a directory" in reported
