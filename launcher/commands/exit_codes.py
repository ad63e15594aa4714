"""How a command ends."""

from __future__ import annotations

DONE, RUN_FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""The command did what it was for; a run failed; the user's input is wrong; Ctrl-C stopped it."""
