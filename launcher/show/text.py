"""Numbers, amounts and paragraphs as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def dollars(usd: float) -> str:
    """$1,234.50; below ten cents with two more digits."""
    return f"${usd:,.2f}" if usd >= 0.1 or usd == 0 else f"${usd:.4f}"


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 file`, `2 files`; `things` is the plural where an s does not make it."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def indent(text: str, prefix: str = "  ") -> str:
    """Every line with the prefix before it."""
    return "\n".join(prefix + line for line in text.splitlines())


def three_digits(number: float) -> str:
    """Three significant digits, more before the decimal point: `0.25`, `12.3`, `1234`."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"


def number(value: Any, form: str) -> str:
    """A number in a format; - for anything else that a script may have written, and for a whole number beyond any float."""
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
