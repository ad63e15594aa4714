"""One HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any

from launcher.show import palette

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
"""The page's Content-Security-Policy: a browser loads nothing for it, and runs only the script of this digest."""


def document(title: str, body: str, data: Any = None, style: str = "", script: str = "charts.ready();\n") -> str:
    """A whole page, in the reader's light or dark scheme, with the charts of page.js and a button to copy what is in a `.paste`.

    Args:
        body: HTML.
        data: JSON-ready; the script finds it in the element #data.
        style: CSS, after that of page.css.
        script: JavaScript, after that of page.js, whose `charts` it draws with. It ends with `charts.ready()`; without charts that is all.

    Raises:
        ValueError: a number in the data is not finite.
    """
    here = Path(__file__)
    base, kit = (here.with_suffix(ending).read_text(encoding="utf-8") for ending in (".css", ".js"))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )  # nothing in it ends the script
    script = kit + script
    light, dark = palette.variables(0), palette.variables(1)
    base = f":root,:root.print{{{light}}}@media (prefers-color-scheme:dark){{:root:not(.print){{{dark}}}}}{base}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{POLICY.format(script=digest)}\">"
        f"<title>{escape(title)}</title><style>{base}{style}</style></head><body>{body}"
        f"<script type='application/json' id='data'>{text}</script><script>{script}</script></body></html>\n"
    )
    return page.encode("utf-8", "backslashreplace").decode()  # a file's name may hold bytes that are not UTF-8
