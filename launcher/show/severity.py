"""Words of severity in colour, if the terminal has colours and the user wants them."""

from __future__ import annotations

import os
import re
from typing import TextIO

RED, GREEN, YELLOW, CYAN = 31, 32, 33, 36
"""SGR codes: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html"""

_COLOURS = {"mistake": RED, "error": RED, "missing": RED, "warning": YELLOW, "not checked": CYAN, "ok": GREEN}

_WORD = re.compile(rf"^( *(?:\d+ )?)(({'|'.join(_COLOURS)})s?)(?=$| |:)", re.MULTILINE)
"""A word of severity that opens a line, with the number before it: `3 mistakes in job.yaml:`."""


def coloured(text: str, stream: TextIO) -> str:
    """The text with coloured words of severity at the start of its lines; unchanged if the stream shows no colours.

    NO_COLOR, if set and not empty, turns colours off: https://no-color.org
    """
    wanted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return _WORD.sub(lambda found: f"{found[1]}\x1b[{_COLOURS[found[3]]}m{found[2]}\x1b[0m", text) if wanted else text
