"""The bottlenecks that planted_foreign.py plants in scripts that do not use the kit, by the scripts' arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.insight.findings import Fix

FOREIGN, NOTEBOOKS = Path(__file__).with_name("foreign"), Path(__file__).parents[2] / "notebooks"

SIMULATED = "simulated"
"""Plain PyTorch on a simulated accelerator: what only a GPU shows."""

FRAMEWORKS = {
    "plain": FOREIGN / "plain.py",
    "lightning": FOREIGN / "lightning_fit.py",
    "trainer": FOREIGN / "trainer.py",
    SIMULATED: NOTEBOOKS / "simulated_training.py",
}
"""The framework -> its script."""

LIGHT = {"model": "mobilenet_v3_small", "size": 96, "steps": 60}
"""A model that waits for expensive images."""

HEAVY = {"model": "resnet18", "size": 112, "batch-size": 16, "steps": 25}
"""So much compute that nothing else shows, in one epoch: when a second one starts its workers, the process copies its memory."""

GROWING = {**HEAVY, "workers": 0, "size": 192, "steps": 40}
"""Steps long enough for memory to be filled beside them."""

EXCHANGING = {"size": 32, "batch-size": 4, "steps": 60, "optimizer": "sgd"}
"""Small batches of small images, and an optimizer that takes no time, so that the exchange remains."""

_LOADER = {**dict.fromkeys(FRAMEWORKS, "loader = DataLoader("), "trainer": "trainer.train()"}
_HELD_OUT = {**_LOADER, "plain": "held_out = DataLoader(", "lightning": "held_out = DataLoader("}
_SAVING = {"plain": "torch.save(", "lightning": "trainer.fit(", "trainer": "trainer.train()"}

LINES: Mapping[str, Mapping[str, str | tuple[str, ...]]] = {
    "too_many_workers": _LOADER,
    "too_few_workers": _LOADER,
    "slow_epoch_starts": _LOADER,
    "small_batch": _LOADER,
    "synchronising_calls": {SIMULATED: "average += 0.1 * (loss.item()"},
    "host_to_device_bound": {SIMULATED: "inputs, labels = inputs.to(device)"},
    "evaluation_stalls": _HELD_OUT,
    "checkpoint_stalls": _SAVING,
    "data_bound": dict.fromkeys(FRAMEWORKS, "def __getitem__("),
    "storage_bound": dict.fromkeys(FRAMEWORKS, "def __getitem__("),
    "main_thread_bound": dict.fromkeys(FRAMEWORKS, ("sum(range(1000))", "while time.perf_counter() < until:")),
}
"""How the line that a finding must name begins, by framework: if the framework does the work itself, the call of it. For other kinds,
no line is to blame."""


@dataclass(frozen=True)
class Case:
    """One run with something planted; `kind` is the right finding, None for a healthy run."""

    kind: str | None
    form: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    ranks: int = 1
    threads: int | None = None
    """Of each process's compute; None: torch's choice."""
    neighbours: int = 0
    """Processes outside the run that take a core each."""
    fixed: Mapping[str, object] | None = None
    """Arguments in place of the finding's fix, if that is a line of the script or another program; None: its setting."""

    def after(self, fix: Fix) -> Case | None:
        """The run with a finding's fix, with as many images; None: the script has no argument for it."""
        change = self.fixed
        if change is None and fix.setting in ARGUMENTS:
            change = {ARGUMENTS[fix.setting]: fix.value}
        if change is None:
            return None
        arguments = {**self.arguments, **change}
        if "batch-size" in change:
            arguments["steps"] = int(arguments["steps"] * self.arguments["batch-size"] / arguments["batch-size"])
        return replace(self, arguments=arguments, neighbours=0)


ARGUMENTS = {"num_workers": "workers", "batch_size": "batch-size", "precision": "precision"}
"""A fix's setting -> the script's argument."""


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

CHEAP = {"threads-a-worker": 1, "cpu-ms-an-image": 1}
"""Images that cost next to nothing."""

ON_A_DEVICE = (
    Case("too_many_workers", "16 on 2 cores", {"workers": 16}),
    Case("too_many_workers", "16 on 2 cores, the loss read at every step", {"workers": 16, "synchronise": True}),
    Case("noisy_neighbour", "6 processes outside", CHEAP, neighbours=6, fixed={}),
    Case("noisy_neighbour", "12 processes outside", CHEAP, neighbours=12, fixed={}),
    Case("too_few_workers", "none", {**CHEAP, "workers": 0, "cpu-ms-an-image": 8}),
    Case("too_few_workers", "one", {"workers": 1, "threads-a-worker": 1, "cpu-ms-an-image": 8}),
    Case("data_bound", "24 ms an image", {"cpu-ms-an-image": 24}),
    Case("data_bound", "48 ms an image", {"cpu-ms-an-image": 48, "steps": 32}),
    Case(
        "synchronising_calls",
        "80 ms of Python then",
        {**CHEAP, "synchronise": True, "metric-ms": 80},
        fixed={"synchronise": False},
    ),
    Case(
        "synchronising_calls",
        "120 ms of Python then",
        {**CHEAP, "synchronise": True, "metric-ms": 120},
        fixed={"synchronise": False},
    ),
    Case("small_batch", "4 images", {**CHEAP, "batch-size": 4, "steps": 200}),
    Case("small_batch", "2 images", {**CHEAP, "batch-size": 2, "steps": 200}),
    Case("main_thread_bound", "250 ms a step", {**CHEAP, "metric-ms": 250}, fixed={"metric-ms": 0}),
    Case("main_thread_bound", "500 ms a step", {**CHEAP, "metric-ms": 500, "steps": 32}, fixed={"metric-ms": 0}),
    Case("host_to_device_bound", "60 ms a batch", {**CHEAP, "copy-ms": 60}, fixed={"copy-ms": 0}),
    Case("host_to_device_bound", "300 ms a batch", {**CHEAP, "copy-ms": 300, "steps": 32}, fixed={"copy-ms": 0}),
    Case("fp32_compute", "360 ms a step", {**CHEAP, "precision": "fp32"}),
    Case("gpu_memory_growth", "24 MB a step", {**CHEAP, "keep-mb": 24}),
    Case(None, "two workers", {}),
    Case(None, "two workers, the loss read at every step", {"synchronise": True}),
    Case(None, "cheap images", CHEAP),
    Case(None, "a wait for data that the device does not feel", {**CHEAP, "workers": 0, "cpu-ms-an-image": 3}),
    Case(None, "16 workers with cheap images", {**CHEAP, "workers": 16, "steps": 200, "epochs": 1}),
)
"""On the simulated accelerator; a step of it takes 180 ms."""


def cases(framework: str) -> tuple[Case, ...]:
    return ON_A_DEVICE if framework == SIMULATED else CASES
