"""The exit codes of commands."""

from __future__ import annotations

DONE, RUN_FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
"""Success; a run failed; the user's input is wrong; stopped by Ctrl-C."""
