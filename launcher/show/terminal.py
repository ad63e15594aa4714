"""Text for a terminal, without control sequences except colours and those that rewrite a line.

A script's log, a setting or a file's name may hold any byte, and a terminal obeys: it sets its title or the clipboard, moves
over lines that were printed before, and types answers back. https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
"""

from __future__ import annotations

import io
import re

_OBEYED = re.compile(
    r"\x1b\[[0-9;:]*m"  # SGR: colours
    r"|\x1b\[[012]?K"  # EL: erase in the line
    r"|[\t\n\r]"
    r"|([\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069])"  # the last two turn the direction of text
)


def neutralised(text: str) -> str:
    r"""The text with every control character visible, as `\x1b`, except tabs, line ends, colours and erasing a line."""
    return _OBEYED.sub(lambda found: ascii(found[1])[1:-1] if found[1] else found[0], text)


class Terminal(io.TextIOWrapper):
    """A terminal's stream that neutralises what is written to it."""

    def write(self, text: str, /) -> int:
        super().write(neutralised(text))
        return len(text)
