"""Numbers, amounts and paragraphs as text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

SHARES = ("accuracy", "agreement", "miou", "share")
"""Last words of the names of numbers from 0 to 1 that are shown in percent."""


def dollars(usd: float) -> str:
    """$1,234.50; two more digits below ten cents."""
    return f"${usd:,.2f}" if usd >= 0.1 or usd == 0 else f"${usd:.4f}"


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 file`, `2 files`; `things` is the plural if it is not formed with an s."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def indent(text: str, prefix: str = "  ") -> str:
    """Every line with the prefix before it."""
    return "\n".join(prefix + line for line in text.splitlines())


def three_digits(number: float) -> str:
    """Three significant digits, more before the decimal point: `0.0034`, `0.25`, `12.3`, `1234`."""
    if abs(number) < 1:
        return f"{number:.3g}"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def number(value: Any, form: str) -> str:
    """A number in a format; - for anything else that a script may have written, and for an integer too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-"
    try:
        return format(value, form)
    except (OverflowError, ValueError):
        return "-"


def file_size(bytes: float) -> str:
    """`812 B`, `1.5 kB`, `3.2 GB`: powers of 1000."""
    power = next(power for power in range(5) if bytes < 1000 ** (power + 1) or power == 4)
    return f"{bytes / 1000**power:.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def duration(seconds: float) -> str:
    """`5.7 s`, `12 min 30 s`, `3 h 5 min`, `2 d 4 h`; - if not a finite number."""
    if isinstance(seconds, float) and not math.isfinite(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    larger = next(place for place, (size, _) in enumerate(units) if seconds >= size)
    (size, unit), (smaller, part) = units[larger : larger + 2]
    whole, rest = divmod(int(seconds), size)
    return f"{whole} {unit}" + (f" {rest // smaller} {part}" if rest // smaller else "")


def shown(name: str, value: Any) -> str:
    """A measured value for people: shares in percent, four digits of a number, thousands apart, nothing in Python's spelling.

    Args:
        name: the value's; its last word says whether it is a share.
    """
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, float):
        is_share = name.rsplit("_", 1)[-1] in SHARES and 0 <= value <= 1
        return f"{100 * value:.2f} %" if is_share else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(str(key), item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(name, item) for item in value)
    return str(value)


def written(value: Any) -> str:
    """A value on one line, as YAML without the outer brackets."""
    if isinstance(value, Mapping):
        parts = (
            (name, f"{{{written(item)}}}" if isinstance(item, Mapping) else written(item))
            for name, item in value.items()
        )
        return ", ".join(f"{name}: {text}" for name, text in parts)
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def shortened_apart(first: str, second: str, width: int) -> tuple[str, str]:
    """Two texts cut to `width` characters so that their difference shows: if one is longer, without their common start."""
    if max(len(first), len(second)) > width:
        alike = len(os.path.commonprefix([first, second]))
        begin = min(alike - width // 8, max(len(first), len(second)) - width + 1)
        if begin > 1:
            first, second = (f"…{text[begin:]}" for text in (first, second))
    return shortened(first, width), shortened(second, width)


def shortened(text: str, width: int) -> str:
    """A text of at most `width` characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"
