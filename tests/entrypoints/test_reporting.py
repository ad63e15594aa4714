"""What a run writes to its log."""

from __future__ import annotations

import io
import sys

import pytest
from training.runtime.reporting import write_line


@pytest.mark.parametrize(("encoding", "line"), [("utf-8", "é \\udcff\n"), ("ascii", "\\xe9 \\udcff\n")])
def test_a_name_that_the_log_cannot_encode_is_written_with_escapes(monkeypatch, encoding, line):
    """As of a file whose name is no UTF-8, where the log is strict."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors="strict"))
    write_line("é \udcff")
    assert written.getvalue() == line.encode(encoding)
