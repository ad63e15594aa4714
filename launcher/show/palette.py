"""The colours of pages and pictures. Each means one thing: a severity, a phase of a step, or a resource."""

from __future__ import annotations

SEVERITIES = {"bad": ("#b3261e", "#ff8a80"), "risk": ("#8a5a00", "#f0b94d")}
"""Name -> in the light and in the dark scheme. A bottleneck is bad."""

PHASES = (
    ("#c2388f", "#e66bb8"),  # data_wait
    ("#d26cab", "#f2b3d8"),  # host_to_device
    ("#a27dd4", "#d9bff7"),  # augment
    ("#2a9d8f", "#4fc4b4"),  # buffer_sync
    ("#2566ae", "#4f97d8"),  # teacher_forward
    ("#5895d8", "#a5cbf0"),  # student_forward
    ("#2f9fbd", "#6fd3ea"),  # forward
    ("#8a9455", "#bcc78b"),  # loss
    ("#33447f", "#8095f0"),  # backward
    ("#4c8f3f", "#7cc46c"),  # grad_sync
    ("#6b4fa0", "#a06be0"),  # optimizer
)
"""In the order of a step; related phases share a hue: input, exchange, forward passes."""

UNNAMED, BESIDE = ("#c9ced6", "#4a525c"), ("#8d96a0", "#8d96a0")
"""For the part of a step outside its phases, and for time outside the steps."""

RESOURCES = {
    "CPU, mean of the cores": ("#3737af", "#0afabe"),
    "CPU, busiest core": ("#cd0a55", "#dceb55"),
    "GPU": ("#194628", "#0a820a"),
    "GPU memory": ("#be7364", "#af5564"),
    "memory": ("#820a91", "#916491"),
    "I/O wait": ("#46370a", "#a07346"),
    "throttled by the quota": ("#642837", "#82820a"),
    "disk read": ("#cd640a", "#cd550a"),
    "disk write": ("#916482", "#fabe91"),
    "network receive": ("#730a55", "#dc1955"),
    "network transmit": ("#73280a", "#558255"),
}
"""Lines of the charts over time."""

PROGRESS = "#6e7b8a"
"""Of a notebook's bars and curves, in any theme."""

DARK_TEXT, LIGHT_TEXT = "#000000", "#ffffff"


def variables(scheme: int) -> str:
    """CSS variables of all colours: --c0 for the first phase, with --on-c0 for text on it, and --r0 for the first resource.

    Args:
        scheme: 0 light, 1 dark.
    """
    areas = {f"c{place}": both[scheme] for place, both in enumerate(PHASES)}
    areas |= {"none": UNNAMED[scheme], "beside": BESIDE[scheme]}
    lines = {f"r{place}": both[scheme] for place, both in enumerate(RESOURCES.values())}
    lines |= {name: both[scheme] for name, both in SEVERITIES.items()}
    upon = {f"on-{name}": text_upon(colour) for name, colour in areas.items()}
    return "".join(f"--{name}:{colour};" for name, colour in (areas | lines | upon).items())


def resource(name: str) -> str:
    """The variable of a resource's colour; those without one of their own share them."""
    name = "GPU" if name == "GPU, mean" else name
    place = [*RESOURCES].index(name) if name in RESOURCES else sum(name.encode()) % len(RESOURCES)
    return f"--r{place}"


def text_upon(colour: str) -> str:
    """Dark or light text, whichever is easier to read on a colour."""
    return max((DARK_TEXT, LIGHT_TEXT), key=lambda text: contrast(text, colour))


def contrast(one: str, other: str) -> float:
    """Contrast, 1 to 21, of two colours such as #1b1f24: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    """0 to 1: https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
