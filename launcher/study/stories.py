"""What two public stories' figures say about scaling: which part of a speed-up they explain, and what they leave open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from launcher.config.issues import did_you_mean, mistake
from launcher.study.scaling_model import BACKWARD, ring
from launcher.study.sections import Section, as_html, as_text


@dataclass(frozen=True)
class PublishedStory:
    """The answer on paper: no run, only the published figures and the formulas of the scaling model. `print` it.

    >>> launcher.study.story("hyundai").title
    'Reducing ML Model Training Time Using Amazon SageMaker...'
    """

    title: str
    parts: tuple[Section, ...]
    explained: tuple[str, ...]
    open: tuple[str, ...]
    """What the figures cannot tell."""
    next: str
    """How to find it out."""

    def __str__(self) -> str:
        told = [
            "what the figures explain",
            "",
            *self.explained,
            "",
            "what they cannot tell",
            "",
            *self.open,
            "",
            self.next,
        ]
        return "\n\n".join([self.title, *as_text(self.parts), "\n".join(told)])

    def __repr__(self) -> str:
        return f"<published story: {self.title}>"

    def _repr_html_(self) -> str:
        def points(lines: tuple[str, ...]) -> str:
            return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"

        told = [f"<h4>What the figures explain</h4>{points(self.explained)}"]
        told += [f"<h4>What they cannot tell</h4>{points(self.open)}", f"<p>{escape(self.next)}</p>"]
        return "\n".join([f"<h3>{escape(self.title)}</h3>", *as_html(self.parts), *told])


def story(name: str) -> PublishedStory:
    """A story's figures, taken apart.

    >>> len(launcher.study.story("kt").explained) > 0
    True

    Args:
        name: kt or hyundai.

    Raises:
        UserError: no such story.
    """
    if name not in STORIES:
        fix = did_you_mean(name, STORIES, f"launcher study story {next(iter(STORIES))}")
        raise mistake("STORY", f"no story {name}", fix, valid=", ".join(STORIES))
    return STORIES[name](figures()[name])


@cache
def figures() -> Mapping[str, Any]:
    """published_scaling.yaml."""
    import yaml  # here, so that whoever imports this module pays for it only when asking

    text = (Path(__file__).parent / "published_scaling.yaml").read_text(encoding="utf-8")
    stories: Mapping[str, Any] = yaml.safe_load(text)
    return stories


def _kt(given: Mapping[str, Any]) -> PublishedStory:
    before, after, claimed = given["before"], given["after"], given["speed_up"]
    whole = before["hours"] / before["epochs"] / (after["hours"] / after["epochs"])
    gpus = after["gpus"] / before["gpus"]
    each, best = whole / gpus, figures()["hyundai"]["efficiency"]["share"]
    batch = given["batch"]["after"] / given["batch"]["before"]
    hours = [side["gpus"] * side["hours"] / side["epochs"] for side in (before, after)]
    forward, backward = (fmean(given["iterations"][name]) for name in ("forward", "backward"))
    step = fmean(given["iterations"]["dataloader"]) + forward + backward
    needed = forward / (1 - BACKWARD)  # forward and backward together, if all of forward had a backward
    rows = [
        ["whole speed-up, as published", f"{claimed}", f"{before['hours_an_epoch']:.2f} h / {after['hours_an_epoch']} h, both rounded"],
        ["whole speed-up", f"{whole:.1f}", f"({before['hours']} h / {before['epochs']}) / ({after['hours']} h / {after['epochs']})"],
        ["of it, more GPUs: at most", f"{gpus:.1f}", f"{after['gpus']} / {before['gpus']}, as if their exchange took no time"],
        ["what is left for each GPU: at least", f"{each:.2f}", f"{whole:.1f} / {gpus:.0f}; as published {claimed / gpus:.2f}"],
        [f"the same at {best * 100:.0f} % efficiency", f"{each / best:.2f}", f"{each:.2f} / {best}, Hyundai's best at 64 GPUs"],
        ["of that, the larger batch: at most", f"{batch:.3f}", f"{given['batch']['after']} / {given['batch']['before']}, steps no longer"],
    ]  # fmt: skip
    below = [
        f"GPU-hours an epoch: {hours[0]:.2f} before, {hours[1]:.2f} after. By scaling alone that is "
        f"{each * 100:.0f} % efficient: it cannot be."
    ]
    times = [
        ["forward, teacher and student", f"{forward:.2f}"],
        ["backward, the student's alone", f"{backward:.2f}"],
        ["backward at most needed", f"{needed - forward:.2f}"],
        ["not explained by computing", f"{step - needed:.2f}"],
    ]
    about = [
        f"Backward takes about twice its forward, so {forward:.2f} s of forward ask for at most {needed:.2f} s in all: "
        f"{(1 - needed / step) * 100:.0f} % of the step was",
        f"something else. Gone, it would make that job {step / needed:.1f} times as fast. (If the log's clock did not wait for the GPU, "
        "forward is told too short, and this too high.)",
    ]
    explained = (
        f"At most {gpus:.0f} of the {whole:.0f} times come from {gpus:.0f} times the GPUs; at least {each:.2f} times must come from "
        "elsewhere.",
        "Not from the GPU itself: before and after it is an A100, after with half the memory.",
        f"If the 3.20 h came from a job that waited like the slow one in the log, its waiting is more than enough for it: there were "
        f"{step / needed:.1f} times to be had.",
    )
    left = (
        f"How the {each:.2f} divide among these: {'; '.join(given['changes'])}. No time is given between one and the next.",
        "On which machine the slow iterations were taken, and whether the 3.20 h an epoch waited like them.",
        "How well the job scales: 2 GPUs were not tuned like the 32, so no efficiency follows, and no exposed exchange.",
        "What it cost: the price of the 2 GPUs on premises is not given.",
    )
    sections = (
        ("KT: 29 times on 16 times the GPUs", ["part", "times", "from"], rows, below),
        ("an iteration of the slow job, seconds", ["part", "mean of 5"], times, about),
    )
    ask = "launcher study scaling configs/kt_food_tag.yaml --on aws --hosts 1,2,4 --max-cost USD"
    return PublishedStory(
        given["title"], sections, explained, left, f"To find out: the tuned job on one host, then more: {ask}"
    )


def _hyundai(given: Mapping[str, Any]) -> PublishedStory:
    before, after, best = given["before"], given["after"], given["efficiency"]
    whole = before["minutes_an_epoch"] / after["minutes_an_epoch"]
    low = (before["minutes_an_epoch"] - 0.5) / (after["minutes_an_epoch"] + 0.5)
    high = (before["minutes_an_epoch"] + 0.5) / (after["minutes_an_epoch"] - 0.5)
    hosts = after["hosts"] / before["hosts"]
    by_bytes, by_turns = (efficiency_elsewhere(best["share"], best["hosts"], after["hosts"])[kind] for kind in (0, 1))
    rows = [
        ["whole speed-up, as published", f"{given['speed_up']}", '"10 times"'],
        ["whole speed-up", f"{whole:.1f} ({low:.1f} to {high:.1f})", "57 min / 6 min, each rounded to a minute"],
        ["of it, more instances: at most", f"{hosts:.1f}", '"five times as many instances"'],
        ["of it, at the 93 % told: about", f"{hosts * by_bytes:.2f} to {hosts * by_turns:.2f}", "5 times the efficiency below"],
        ["left for each: at least", f"{whole / hosts:.2f} ({low / hosts:.2f} to {high / hosts:.2f})", f"{whole:.1f} / {hosts:.0f}"],
        ["left at that efficiency", f"{whole / hosts / by_turns:.2f} to {whole / hosts / by_bytes:.2f}", "beside rounding"],
    ]  # fmt: skip
    elsewhere = []
    for count in (2, 4, 5, 8, 16):
        shares = efficiency_elsewhere(best["share"], best["hosts"], count)
        elsewhere.append([str(count), str(8 * count), *(f"{share * 100:.1f} %" for share in shares)])
    exposed = 1 / best["share"] - 1
    below = [
        f"{best['share'] * 100:.0f} % at {best['hosts']} instances: what is exposed takes {exposed * 100:.1f} % of "
        "the rest of a step. A ring's bytes grow with 2(n-1)/n,",
        "its turns with 2(n-1), so all other sizes lie between the columns, if it was weak scaling beside one instance and nothing hid it.",
    ]
    explained = (
        f"At most {hosts:.0f} of the {whole:.1f} times come from five instances, by the 93 % about {hosts * by_bytes:.1f}: scaling is half "
        "of the story.",
        f"Each instance must have become about {whole / hosts / by_bytes:.1f} times as fast.",
        "57 to 6 minutes and 93 % do not contradict each other: they are two measurements.",
    )
    left = (
        f"How that divides among these: {'; '.join(given['changes'])}.",
        "What the 93 % is a share of: beside one GPU or one instance, with the same batch a GPU or the same in all, on ml.p3.16xlarge "
        "or on the ml.p4d.24xlarge of its example.",
        "Whether exchange, input or uneven ranks took the 7 %: no step times, model size or batch are given.",
        "What it cost: no hours of the whole training are given.",
    )
    sections: tuple[Section, ...] = (
        ("Hyundai: 57 to 6 minutes on five instances", ["part", "times", "from"], rows, []),
        (
            "93 % at 8 instances: what it means elsewhere",
            ["instances", "GPUs", "if bytes limit", "if latency limits"],
            elsewhere,
            below,
        ),
    )
    ask = "launcher study scaling configs/hyundai_segmentation.yaml --on aws --hosts 1,2,4,8 --max-cost USD"
    return PublishedStory(given["title"], sections, explained, left, f"To find out: {ask}")


def efficiency_elsewhere(share: float, hosts: int, other: int) -> tuple[float, float]:
    """Weak-scaling efficiency on another number of hosts, beside one host, by the ring all-reduce of scaling_model.py: where its
    bytes limit it, and where its turns do.

    Args:
        share: the efficiency on `hosts`, more than one; all that is lost there is exposed exchange.
    """
    exposed = 1 / share - 1  # of the rest of the step
    (turns, volume), (other_turns, other_volume) = ring(hosts), ring(other)
    return 1 / (1 + exposed * other_volume / volume), 1 / (1 + exposed * other_turns / turns)


STORIES: Mapping[str, Callable[[Mapping[str, Any]], PublishedStory]] = {"kt": _kt, "hyundai": _hyundai}
