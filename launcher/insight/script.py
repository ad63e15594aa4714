"""What the observer saw of a user script: what it set up, on which line, and where its host's time goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

FRAMEWORKS = ("transformers", "lightning", "pytorch_lightning", "accelerate")
"""Packages that make loaders and steps for a script, with their own names for the settings; the outer one comes first."""

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
"""torch's dtype names -> the kit's; every other one is fp32."""

PAUSES = ("evaluate", "checkpoint", "between_passes")
"""Phases of samples that lie between steps."""

WAITS_FOR_THE_DEVICE = re.compile(r"\.(item|cpu|tolist|numpy|synchronize)\(|\bprint\(|\bfloat\(")
"""What a line of Python calls to read a number from the device. print and float do so with a tensor."""


@dataclass(frozen=True)
class Address:
    """A line of the user's own code."""

    file: str
    """Relative to the script's folder if it lies below, else absolute."""
    line: int
    text: str = ""
    """The line's code; "" if it is not known."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_own(self) -> bool:
        """Whether the user wrote it, as opposed to an installed package."""
        return not any(
            place in self.file for place in ("site-packages", "dist-packages", "/torchinductor_", "/.triton/")
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """An object that the script set up, or a call in its loop."""

    of: str
    """loader, model, optimizer, precision, scaler, compile, data_parallel, device, backward, step, checkpoint, copy."""
    at: Address
    values: Mapping[str, Any]
    via: str | None = None
    """The package whose code made it for the script; None: the script's own line did."""


@dataclass(frozen=True, kw_only=True)
class SampledLine:
    """A line of the user's code in which the training thread was seen."""

    at: Address
    phase: str | None
    """The phase of the step under way; None: no phase."""
    package: str | None
    """The installed package whose code it was running; None: its own, or the standard library's."""
    in_model: bool
    """Whether a model's forward pass was under way."""
    share: float
    """Of all samples, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script, as its first rank shows it. Everything is empty if no rank was observed."""

    parts: tuple[Part, ...] = ()
    """In the order in which they were made."""
    lines: tuple[SampledLine, ...] = ()
    """Where the training thread was, most often first."""
    other_ranks: Mapping[int, tuple[SampledLine, ...]] = field(default_factory=dict)
    """Rank -> the same for the other ranks' training threads."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The hyperparameters of the run's config, or the options of a watched command."""
    by_launcher: bool = False
    """Whether a job of the launcher started it, so that keys of its config apply."""

    def of_rank(self, rank: int) -> Script:
        """The script with the lines of one rank."""
        return replace(self, lines=self.other_ranks.get(rank, self.lines))

    @property
    def framework(self) -> str | None:
        """The outermost framework that makes things for the script. A library that only saves the model is none."""
        seen = {part.via for part in self.parts if part.of != "checkpoint"}
        return next((name for name in FRAMEWORKS if name in seen), None)

    def part(self, of: str) -> Part | None:
        """The first of its kind."""
        return next((part for part in self.parts if part.of == of), None)

    def loader(self, role: str) -> Part | None:
        """The first DataLoader of a role: training or evaluation."""
        return next(iter(self.loaders(role)), None)

    def loaders(self, role: str) -> list[Part]:
        """DataLoaders of a role; one that the same line makes repeatedly, such as for each epoch, counts once."""
        found: dict[Any, Part] = {}
        for part in self.parts:
            if part.of == "loader" and part.values.get("role") == role:
                found.setdefault((part.at.file, part.at.line, part.values.get("batch_size")), part)
        return [*found.values()]

    def takes_workers(self, number: int) -> bool:
        """Whether the number of the training loader's workers can be set from outside, as setting_overrides.py of the observer has it. True
        if it was not recorded, as by earlier observers."""
        loader = self.loader("training")
        values = loader.values if loader is not None else {}
        return not (values.get("workers_stay") or (values.get("persistent_workers") and not number))

    @property
    def frozen_model(self) -> Part | None:
        """The first model without a trainable parameter, such as a teacher."""
        models = (part for part in self.parts if part.of == "model")
        return next((part for part in models if part.values.get("trainable") == 0), None)

    @property
    def trained_model(self) -> Part | None:
        models = (part for part in self.parts if part.of == "model")
        return next((part for part in models if part.values.get("trainable") != 0), None)

    @property
    def is_sharded(self) -> bool:
        """Whether the model's weights are sharded across the ranks."""
        made = self.part("data_parallel")
        return made is not None and made.values.get("class") in ("FullyShardedDataParallel", "fully_shard")

    @property
    def precision(self) -> str | None:
        """bf16, fp16, tf32 or fp32; None: not known."""
        seen = [part for part in self.parts if part.of == "precision"]
        if not seen:
            return None
        model, latest = self.trained_model, seen[-1].values
        for name in (latest.get("autocast"), model.values.get("dtype") if model else None):
            short = DTYPES.get(str(name).removeprefix("torch."))
            if short is not None:
                return short
        if latest.get("allow_tf32") or latest.get("matmul_precision") in ("high", "medium"):
            return "tf32"
        # FSDP has a policy, which was not recorded
        return None if self.is_sharded or "allow_tf32" not in latest else "fp32"

    @property
    def convolves(self) -> bool:
        """Whether most of the trained model's arithmetic is convolutions: more of them than matrices. False if it was not recorded, as by
        earlier observers."""
        values = self.trained_model.values if self.trained_model is not None else {}
        return bool(values.get("convolutions", 0) > values.get("matrices", 0))

    @property
    def convolves_in_tf32(self) -> bool:
        """Whether it computes them in TF32 on GPUs that have it: cuDNN's switch is on by default, unlike that of matrix products."""
        switches = [part.values for part in self.parts if part.of == "precision"]
        return self.convolves and bool(switches) and bool(switches[-1].get("cudnn_allow_tf32"))

    def settings(self) -> dict[str, Any]:
        """The settings that rules look at, under the kit's names; and the arguments under their own keys."""
        found: dict[str, Any] = {}
        loaders = self.loaders("training")
        if loaders:
            for name in ("pin_memory", "prefetch_factor", "persistent_workers"):
                found[name] = loaders[0].values.get(name)
            workers = [part.values.get("num_workers") for part in loaders]
            known = [number for number in workers if number is not None]
            found["num_workers"] = sum(known) if known else None
            if len(loaders) == 1:  # of several in a step, none is the step's
                found["batch_size_per_device"] = loaders[0].values.get("batch_size")
        if self.parts:
            found |= {"precision": self.precision, "compile": self.part("compile") is not None}
        settings = {name: value for name, value in found.items() if value is not None}
        return settings | {self.key(name): value for name, value in self.arguments.items()}

    def key(self, argument: str) -> str:
        """What sets an argument: a key of the config, or an option of the command."""
        return f"hyperparameters.{argument}" if self.by_launcher else f"--{argument}"

    def busiest(self, phase: str) -> SampledLine | None:
        """The line of the user's code in which the training thread was most often during a phase."""
        return next((line for line in self.lines if line.phase == phase and line.at.is_own), None)

    @property
    def loop_lines(self) -> tuple[SampledLine, ...]:
        """Where the loop's own Python runs, outside of models, torch and the framework: in no phase, beside the forward pass, or in the
        optimizer's closure, which holds Lightning's training step."""
        known = ("torch", *FRAMEWORKS)
        return tuple(
            line
            for line in self.lines
            if line.phase in (None, "forward", "optimizer")
            and not line.in_model
            and line.package not in known
            and line.at.is_own
        )

    @property
    def loop_share(self) -> float:
        """Share of the samples within steps that lie in `loop_lines`."""
        paused = sum(line.share for line in self.lines if line.phase in PAUSES)
        return sum(line.share for line in self.loop_lines) / (1 - paused) if paused < 1 else 0.0

    @property
    def waiting_line(self) -> SampledLine | None:
        """The line that most often reads a number from the device, and waits for it."""
        lines = (line for line in self.lines if line.at.is_own and WAITS_FOR_THE_DEVICE.search(line.at.text))
        return next((line for line in lines if line.phase not in ("data_wait", *PAUSES)), None)
