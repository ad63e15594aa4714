"""The bottlenecks that planted_foreign.py plants in scripts that know nothing of the kit, by the arguments of tests/benchmarks/foreign/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FRAMEWORKS = {"plain": "plain.py", "lightning": "lightning_fit.py", "trainer": "trainer.py"}
"""The framework -> its script in tests/benchmarks/foreign/."""

LIGHT = {"model": "mobilenet_v3_small", "size": 96, "steps": 60}
"""A model that waits for costly images."""

HEAVY = {"model": "resnet18", "size": 112, "batch-size": 16, "steps": 25}
"""So much arithmetic that nothing else shows, in one epoch: where a second one starts its workers, the process copies its memory."""

GROWING = {**HEAVY, "workers": 0, "size": 192, "steps": 40}
"""Long enough steps for memory to be filled beside them."""

EXCHANGING = {"size": 32, "batch-size": 4, "steps": 60, "optimizer": "sgd"}
"""Small batches of small images, and an optimizer that takes no time: what is left is the exchange."""

_LOADER = {"plain": "loader = DataLoader(", "lightning": "loader = DataLoader(", "trainer": "trainer.train()"}
_HELD_OUT = {**_LOADER, "plain": "held_out = DataLoader(", "lightning": "held_out = DataLoader("}
_SAVING = {"plain": "torch.save(", "lightning": "trainer.fit(", "trainer": "trainer.train()"}

LINES: Mapping[str, Mapping[str, str | tuple[str, ...]]] = {
    "too_many_workers": _LOADER,
    "too_few_workers": _LOADER,
    "slow_epoch_starts": _LOADER,
    "small_batch": _LOADER,
    "evaluation_stalls": _HELD_OUT,
    "checkpoint_stalls": _SAVING,
    "data_bound": dict.fromkeys(FRAMEWORKS, "def __getitem__("),
    "storage_bound": dict.fromkeys(FRAMEWORKS, "def __getitem__("),
    "main_thread_bound": dict.fromkeys(FRAMEWORKS, ("sum(range(1000))", "while time.perf_counter() < until:")),
}
"""How the line begins that a finding must name, by framework: where one does the work itself, the call of it. For other kinds none is
to blame."""


@dataclass(frozen=True)
class Case:
    """One run with something planted; `kind` is the finding that is right, None for a healthy one."""

    kind: str | None
    form: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    ranks: int = 1
    threads: int | None = None
    """Of each process's arithmetic; None: torch's choice."""


CASES = (
    Case("too_many_workers", "8 on 2 cores", {**LIGHT, "workers": 8, "rounds": 2}),
    Case("too_many_workers", "16 on 2 cores", {**LIGHT, "workers": 16, "rounds": 2}),
    Case("too_few_workers", "none, cheap images", {**HEAVY, "workers": 0, "size": 64, "batch-size": 32}, threads=1),
    Case("too_few_workers", "none, costly images", {**LIGHT, "workers": 0, "rounds": 3}, threads=1),
    Case("data_bound", "80 rounds of augmentation", {**LIGHT, "workers": 2, "rounds": 80, "steps": 30}, threads=1),
    Case("data_bound", "160 rounds of augmentation", {**LIGHT, "workers": 2, "rounds": 160, "steps": 20}, threads=1),
    Case("storage_bound", "20 ms an image", {**LIGHT, "workers": 2, "read-seconds": 0.02}),
    Case("storage_bound", "80 ms an image", {**LIGHT, "workers": 2, "read-seconds": 0.08}),
    Case("main_thread_bound", "a fifth of the step", {**HEAVY, "metric-seconds": 0.25}),
    Case("main_thread_bound", "most of the step", {**HEAVY, "metric-seconds": 1.5}),
    Case("checkpoint_stalls", "every 3 steps", {**HEAVY, "model": "resnet50", "size": 64, "save-every": 3}),
    Case("checkpoint_stalls", "every step", {**HEAVY, "size": 64, "save-every": 1}),
    Case("evaluation_stalls", "every 12 steps", {**HEAVY, "evaluate-every": 12}),
    Case("evaluation_stalls", "every 2 steps", {**HEAVY, "evaluate-every": 2}),
    Case("small_batch", "4 images", {**HEAVY, "size": 32, "batch-size": 4, "steps": 200}),
    Case("small_batch", "2 images", {**HEAVY, "size": 32, "batch-size": 2, "steps": 200}),
    Case("slow_rank", "by a third", {**HEAVY, "workers": 0, "slow-rank-seconds": 0.25}, ranks=2, threads=1),
    Case("slow_rank", "by far", {**HEAVY, "workers": 0, "slow-rank-seconds": 1.5}, ranks=2, threads=1),
    Case("communication_bound", "45 MB", {**EXCHANGING, "model": "resnet18"}, ranks=2, threads=1),
    Case("communication_bound", "530 MB", {**EXCHANGING, "model": "vgg11", "steps": 20}, ranks=2, threads=1),
    Case("step_outliers", "4 s in every 25th", {**HEAVY, "steps": 75, "pause-every": 25, "pause-seconds": 4}),
    Case("step_outliers", "10 s in every 20th", {**HEAVY, "steps": 60, "pause-every": 20, "pause-seconds": 10}),
    Case("memory_growth", "slow", {**GROWING, "keep-megabytes": "{0.15}"}),
    Case("memory_growth", "fast", {**GROWING, "keep-megabytes": "{0.25}"}),
    Case("slow_epoch_starts", "1 s", {**HEAVY, "images": 160, "steps": 40, "open-seconds": 1}),
    Case("slow_epoch_starts", "5 s", {**HEAVY, "images": 160, "steps": 40, "open-seconds": 5}),
    Case(None, "a worker", HEAVY),
    Case(None, "cheap images in the process itself", {**HEAVY, "workers": 0, "size": 192}),
    Case(None, "two processes", {**HEAVY, "workers": 0, "size": 160, "steps": 20}, ranks=2, threads=1),
    Case(None, "some checkpoints", {**HEAVY, "save-every": 20}),
)
"""`{0.15}` is that share of the machine's memory, in the run's steps."""
