"""The search for lines that are there for a GPU finds each form in which the product asks for one."""

from __future__ import annotations

import textwrap

import pytest

from tests.device import device_lines
from tests.device.device_lines import Lines

SOURCE = '''
def everywhere(device, fast):
    """Both."""
    if accelerator.is_gpu(device):
        on_gpu = 1  # GPU
        if fast:  # GPU
            on_gpu = 2  # GPU
    else:
        on_gpu = 0
    ids = (
        [0]  # GPU
        if accelerator.is_gpu(device)
        else None
    )
    if device.type == "cpu":
        return ids
    helper()  # GPU
    return ids  # GPU

def helper():
    return 1  # GPU

class Timer:
    def __init__(self, device):
        self._gpu = (
            accelerator.module(device)  # GPU
            if accelerator.is_gpu(device)
            else None
        )

    def start(self):
        if self._gpu is not None and self.wanted:
            self.mark()  # GPU
        elif self._gpu is None:
            pass
        else:
            later()  # GPU

    def mark(self):
        assert self._gpu is not None
        record()  # GPU

def asks(device):
    before()
    stream = accelerator.side_stream(device)  # GPU
    return stream  # GPU

def neither(device):
    if not accelerator.is_gpu(device) or tired:
        raise ValueError
    work()  # GPU
'''


def test_every_form_is_found():
    lines = SOURCE.splitlines()
    wanted = {number for number, line in enumerate(lines, 1) if line.endswith("# GPU")}
    wanted.add(lines.index("        assert self._gpu is not None") + 1)  # `mark` is named for a GPU alone
    assert {line for _, line in Lines({"a.py": SOURCE}).places} == wanted


def test_counted_code_does_what_it_did_and_tells_what_ran(monkeypatch):
    source = textwrap.dedent("""
        def f(device):
            x = 'gpu' if accelerator.is_gpu(device) else 'cpu'
            if not accelerator.is_gpu(device):
                return x
            return x + '!'
    """)
    ran = []
    names = {
        "_device_line": lambda *place: ran.append(place),
        "accelerator": type("", (), {"is_gpu": staticmethod(bool)}),
    }
    exec(compile(Lines({"a.py": source}).counted("a.py"), "a.py", "exec"), names)
    assert names["f"](0) == "cpu" and ran == []
    assert names["f"](1) == "gpu!" and ran == [("a.py", 3), ("a.py", 6)]


@pytest.mark.parametrize("change", ["a new line", "an exception that is gone"])
def test_what_was_not_run_is_named(monkeypatch, change: str):
    monkeypatch.setattr(device_lines, "seen", device_lines.of_the_product().places)
    monkeypatch.setattr(device_lines, "UNSEEN", {})
    assert device_lines.problems() == []
    if change == "a new line":
        device_lines.seen.remove(place := min(device_lines.seen))
        [problem] = device_lines.problems()
        assert problem.startswith(f"{place[0]}:{place[1]} is there for a GPU")
    else:
        monkeypatch.setattr(device_lines, "UNSEEN", {("training/models/precision.py", "gone()"): "why"})
        [problem] = device_lines.problems()
        assert "training/models/precision.py is an exception" in problem and problem.endswith("gone()")
