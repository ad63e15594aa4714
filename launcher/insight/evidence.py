"""The numbers that rules use, derived from a run's measurements: shares of a step, busy cores, idle GPUs."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from launcher.insight import windows
from launcher.insight.measurements import Host, Measurements, Series, Steps
from launcher.insight.phases import parents

IDLE_GPU = 0.3
"""Idle share of a GPU from which something starves it: the threshold of Debugger's LowGPUUtilization, 70 % use."""

UNEVEN = 30.0
"""Percentage points between the means of the most and the least used GPU from which use is uneven. Debugger's LoadBalancing compares
histograms without values above 98 %."""

FEW_SAMPLES = 5
"""Fewer samples of a series than this say nothing about a run."""


class Evidence:
    """Derived numbers of one run; None wherever they were not measured.

    Shares are of the time of a usual step: without the first steps, rare outliers, stalls between steps, and the start.
    """

    def __init__(self, measurements: Measurements):
        self.measurements = measurements
        self.settings = measurements.settings
        self.facts = measurements.facts
        self.script = measurements.script

    # Steps

    @functools.cached_property
    def ranks(self) -> tuple[Steps, ...]:
        """The ranks with at least one logged step."""
        return tuple(steps for steps in self.measurements.ranks if len(steps.step) and "step" in steps.seconds)

    @property
    def only_first_steps(self) -> bool:
        """Whether steps were timed, but none after the first ones, which are slower."""
        return bool(self.ranks) and all(windows.steps_done(steps) <= windows.WARM_UP_STEPS for steps in self.ranks)

    @functools.cached_property
    def world_size(self) -> int | None:
        """Training processes; None: not known."""
        known = self.facts.get("world_size") or len(self.ranks) or None
        return None if known is None else int(known)

    @functools.cached_property
    def unsteady(self) -> float | None:
        """Share of the time by which usual steps are slower than quick ones (their 10th percentile), on the first rank."""
        if not self.ranks:
            return None
        steps = self.ranks[0]
        kept = windows.steady(steps)
        if kept.sum() < 8:
            return None
        seconds = windows.each_step(steps, steps.seconds["step"], kept)
        return max(0.0, 1 - float(np.percentile(seconds, 10)) / float(np.mean(seconds)))

    @functools.cached_property
    def slowest_step(self) -> float | None:
        """Seconds of the longest single step after the first ones, of any rank."""
        longest = [
            steps.extra["slowest_step"][windows.steady(steps)] for steps in self.ranks if "slowest_step" in steps.extra
        ]
        return float(np.nanmax(np.concatenate(longest))) if longest else None

    def mean_extra(self, name: str) -> float | None:
        """Mean over ranks of a number per step; None where a rank lacks it."""
        means = []
        for steps in self.ranks:
            values = steps.extra.get(name)
            values = None if values is None else values[windows.steady(steps)]
            if values is None or not np.isfinite(values).any():  # a rank without it
                return None
            means.append(float(np.nanmean(values)))
        return float(np.mean(means)) if means else None

    @functools.cached_property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, over ranks."""
        means = [windows.timed_mean(steps, "step") for steps in self.ranks]
        return float(np.mean(means)) if means else None

    @functools.cached_property
    def steady_step_seconds(self) -> float | None:
        """The same with the outliers, which CPU times a step count too."""
        means = [windows.timed_mean(steps, "step", np.ones(len(steps.step), bool)) for steps in self.ranks]
        return float(np.mean(means)) if means else None

    @functools.cached_property
    def mfu(self) -> float | None:
        """Model FLOP utilisation in usual steps, 0 to 1: mean over ranks; None: not known."""
        return self.mean_extra("mfu")

    @functools.cached_property
    def phases(self) -> dict[str, float]:
        """Share of each phase in a step: the median over ranks, so that one slow rank does not speak for all."""
        names = {phase for steps in self.ranks for phase in steps.seconds if phase != "step"}
        return {name: self._share(name) for name in sorted(names)}

    def _share(self, phase: str) -> float:
        shares = []
        for steps in self.ranks:
            seconds, whole = windows.mean_seconds(steps, phase), windows.mean_seconds(steps, "step")
            if seconds is not None and whole:
                shares.append(seconds / whole)
        return float(np.median(shares)) if shares else 0.0

    def share(self, *phases: str) -> float | None:
        """Share of a step that these phases take together; None where none of them was measured."""
        known = [self.phases[phase] for phase in phases if phase in self.phases]
        return sum(known) if known else None

    @property
    def forward_share(self) -> float | None:
        return self.share("student_forward", "forward")

    @functools.cached_property
    def unaccounted(self) -> float | None:
        """Share of a step in no phase; None where too few phases were measured to tell."""
        if self.forward_share is None or "backward" not in self.phases or "data_wait" not in self.phases:
            return None
        return max(0.0, 1 - sum(share for name, share in self.phases.items() if name not in parents()))

    @functools.cached_property
    def loop_share(self) -> float | None:
        """Share of a step in Python of the loop itself: in no phase, or, where that is more, sampled there in an observed script, whose
        phase `forward` holds all that happens between a batch's arrival and the backward pass. On a GPU samples do not count: the
        thread may just wait for it. None where neither is known."""
        if self.script is None or self.on_gpu:
            return self.unaccounted
        sampled = self.script.loop_share
        return max(self.unaccounted, sampled) if self.unaccounted is not None else sampled or None

    @functools.cached_property
    def steps_seconds(self) -> float:
        """Seconds of all steps of the first rank, warm-up too."""
        if not self.ranks:
            return 0.0
        return windows.seconds(self.ranks[0])

    def stall_seconds(self, kind: str) -> float:
        """Seconds of all stalls of a kind, on the rank where they took longest."""
        by_rank: dict[int, float] = {}
        for stall in self.measurements.stalls:
            if stall.kind == kind:
                by_rank[stall.rank] = by_rank.get(stall.rank, 0.0) + stall.seconds
        return max(by_rank.values(), default=0.0)

    @functools.cached_property
    def training_seconds(self) -> float:
        """Seconds of steps, of stalls, and of other time between steps."""
        kinds = {stall.kind for stall in self.measurements.stalls}
        pauses = float(windows.between(self.ranks[0], self.measurements.stalls).sum()) if self.ranks else 0.0
        return self.steps_seconds + sum(self.stall_seconds(kind) for kind in kinds) + pauses

    @functools.cached_property
    def steps_part(self) -> float:
        """Share of the training time at the speed of usual steps; the rest are stalls, outliers and the first steps."""
        if not self.training_seconds or not self.step_seconds:
            return 1.0
        usual = self.step_seconds * windows.steps_done(self.ranks[0])
        return min(1.0, usual / self.training_seconds)

    # Hosts

    @functools.cached_property
    def period(self) -> tuple[float, float]:
        """Unix seconds between which the steps ran; everything where no step was measured."""
        began = [
            s.ended[0] - s.seconds["step"][0] * windows.counts(s)[0] for s in self.ranks if np.isfinite(s.ended).all()
        ]
        if not began:
            return -np.inf, np.inf
        return float(min(began)), float(max(steps.ended[-1] for steps in self.ranks))

    def during(self, series: Series, *, pauses: bool = True) -> np.ndarray:
        """The values of a series while steps ran; all of them where too few fall into that time.

        Args:
            pauses: in checkpoints and evaluations between steps, too.
        """
        begin, end = self.period
        chosen = (series.times >= begin) & (series.times <= end)
        for stall in () if pauses else self.measurements.stalls:
            chosen &= (series.times < stall.began) | (stall.began + stall.seconds < series.times)
        inside = series.values[chosen]
        return inside if len(inside) >= FEW_SAMPLES else series.values

    @functools.cached_property
    def training_hosts(self) -> tuple[Host, ...]:
        """The hosts without those of other instance groups that serve them and take no step."""
        stepping = {steps.host for steps in self.ranks}
        without_steps = {*self.measurements.hosts} if self.remote and stepping else set()
        serving = {*self.facts.get("serving_hosts", without_steps)} - stepping
        return tuple(host for name, host in self.measurements.hosts.items() if name not in serving)

    @functools.cached_property
    def serving_hosts(self) -> tuple[Host, ...]:
        """The others, as far as they were watched."""
        training = {host.name for host in self.training_hosts}
        return tuple(host for name, host in self.measurements.hosts.items() if name not in training)

    @functools.cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The training hosts whose cores or GPUs were watched."""
        return tuple(host for host in self.training_hosts if host.cores or host.gpus)

    def usable_cores(self, host: Host) -> float:
        """Cores that the processes may use: by affinity and quota where known, else all that there are."""
        return float(host.usable_cores or len(host.cores) or 1)

    @functools.cached_property
    def _core_tables(self) -> dict[str, np.ndarray]:
        """By host: (cores, n) percent of computing, cut to the shortest core's record; only hosts whose cores were watched.

        SageMaker's agent counts the wait for disks as use of a core; here it is not.
        """
        tables = {}
        for host in (*self.hosts, *self.serving_hosts):
            columns = [self.during(core) for core in host.cores.values()]
            waits = [self.during(host.io_wait[name]) if name in host.io_wait else np.zeros(0) for name in host.cores]
            shortest = min([len(column) for column in columns] + [len(wait) for wait in waits if len(wait)], default=0)
            if shortest >= FEW_SAMPLES:
                pairs = zip(columns, waits)
                rows = [column[:shortest] - (wait[:shortest] if len(wait) else 0.0) for column, wait in pairs]
                tables[host.name] = np.clip(np.stack(rows), 0.0, 100.0)
        return tables

    @property
    def cores_measured(self) -> bool:
        return bool(self._watched)

    def busy_cores(self, host: Host) -> np.ndarray:
        """(n,) cores in use at each sample; (0,) where they were not watched."""
        table = self._core_tables.get(host.name)
        return np.zeros(0) if table is None else table.sum(axis=0) / 100

    @functools.cached_property
    def busy(self) -> float | None:
        """Mean share of the usable cores that was in use, over hosts, 0 to 1. A quota's cores count, not the machine's."""
        return self._busy(self.hosts)

    @functools.cached_property
    def serving_busy(self) -> float | None:
        """The same of the hosts that make the images for others."""
        return self._busy(self.serving_hosts)

    def _busy(self, hosts: Iterable[Host]) -> float | None:
        used = [(self.busy_cores(host), self.usable_cores(host)) for host in hosts]
        shares = [min(1.0, float(cores.mean()) / usable) for cores, usable in used if len(cores)]
        return float(np.mean(shares)) if shares else None

    @functools.cached_property
    def full(self) -> float | None:
        """Share of the samples in which nine tenths of the usable cores were in use, over hosts."""
        shares = [(self.busy_cores(host) >= 0.9 * self.usable_cores(host)).mean() for host in self._watched]
        return float(np.mean(shares)) if shares else None

    @functools.cached_property
    def pegged(self) -> float | None:
        """Share of the samples in which at least one core was at 95 % or more, over hosts; 100 % counts."""
        shares = [(self._core_tables[host.name].max(axis=0) >= 95).mean() for host in self._watched]
        return float(np.mean(shares)) if shares else None

    @property
    def _watched(self) -> list[Host]:
        return [host for host in self.hosts if host.name in self._core_tables]

    @functools.cached_property
    def waiting_cores(self) -> float | None:
        """Mean cores that wait for disks (I/O wait), over hosts."""
        sums = [
            sum(float(self.during(series).mean()) for series in host.io_wait.values() if len(series.values)) / 100
            for host in self.hosts
            if host.io_wait
        ]
        return float(np.mean(sums)) if sums else None

    @functools.cached_property
    def pressure(self) -> float | None:
        """Share of the time in which some process waited for a core (the kernel's pressure stall information), over hosts, 0 to 1."""
        means = [
            float(self.during(series).mean()) / 100
            for host in self.hosts
            for (_, name, _), series in host.other.items()
            if name == "CPUPressurePercent" and len(series.values)
        ]
        return float(np.mean(means)) if means else None

    @functools.cached_property
    def throttled(self) -> float | None:
        """Share of the time in which the cgroup's quota throttled processes, on the most throttled host, 0 to 1."""
        means = [
            min(1.0, float(self.during(host.throttled).mean()) / 100)
            for host in self.training_hosts
            if host.throttled is not None and len(host.throttled.values)
        ]
        return max(means) if means else None

    @functools.cached_property
    def cores_each(self) -> float | None:
        """Usable cores of a training process: the host's over its processes, on the host that has fewest."""
        each = [
            self.usable_cores(host) / self.local_ranks(host) for host in self.hosts if host.cores or host.usable_cores
        ]
        return min(each) if each else None

    def local_ranks(self, host: Host) -> int:
        """Training processes on a host: its ranks, else one a GPU, else one."""
        return sum(steps.host == host.name for steps in self.ranks) or len(host.gpus) or 1

    # GPUs

    @functools.cached_property
    def all_gpu_means(self) -> dict[str, float]:
        """Mean utilisation of every GPU of the hosts in percent, by `host gpu`, also of those that the run does not use."""
        return {
            f"{host.name} {name}": float(values.mean())
            for host in self.hosts
            for name, series in host.gpus.items()
            if len(values := self.during(series)) >= FEW_SAMPLES
        }

    @functools.cached_property
    def gpu_means(self) -> dict[str, float]:
        """The same of the run's own GPUs: of a host whose ranks were timed the busiest, one for each rank."""
        if self.facts.get("device") == "cpu":
            return {}
        own: dict[str, float] = {}
        for host in self.hosts:
            here = {name: mean for name, mean in self.all_gpu_means.items() if name.startswith(f"{host.name} ")}
            busiest = sorted(here, key=here.__getitem__, reverse=True)[: self.local_ranks(host) if self.ranks else None]
            own |= {name: mean for name, mean in here.items() if name in busiest}
        return own

    @functools.cached_property
    def gpu_idle(self) -> float | None:
        """Mean share of the time in which no kernel ran, over GPUs, 0 to 1."""
        return 1 - float(np.mean(list(self.gpu_means.values()))) / 100 if self.gpu_means else None

    @property
    def uneven(self) -> bool:
        """Whether some GPUs are used much more than others, or not at all."""
        means = self.all_gpu_means.values()
        return len(means) > 1 and max(means) - min(means) >= UNEVEN

    @functools.cached_property
    def gpu_memory(self) -> float | None:
        """Memory use of the fullest of the run's GPUs, its 95th percentile in percent."""
        values = [
            float(np.percentile(self.during(series), 95))
            for host in self.hosts
            for name, series in host.gpu_memory.items()
            if len(series.values) and (not self.gpu_means or f"{host.name} {name}" in self.gpu_means)
        ]
        return max(values) if values else None

    @property
    def on_gpu(self) -> bool:
        # where no device is known, those that were watched
        return self.facts.get("device") == "cuda" or bool(self.gpu_means)

    # Settings

    @property
    def remote(self) -> bool:
        """Whether other hosts make the training images."""
        return self.script is None and self.settings.get("worker_type") == "remote"

    @functools.cached_property
    def workers(self) -> int | None:
        """Data workers that make a training process's images, as they ran; 0 where other hosts make them; None: not known."""
        if self.remote:
            return 0
        for value in (self.settings.get("num_workers"), self.facts.get("num_workers")):
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @functools.cached_property
    def worker_use(self) -> float | None:
        """Cores that one data worker keeps busy, 0 to 1; an upper bound where the training process's own part is not known. None where no
        CPU time was measured."""
        seconds = self.mean_extra("worker_cpu_seconds")
        seconds = self.all_cpu if seconds is None else seconds
        if seconds is None or not self.workers or not self.step_seconds:
            return None
        return seconds / self.workers / self.step_seconds

    @functools.cached_property
    def all_cpu(self) -> float | None:
        """CPU seconds a step of the training process and its workers, as far as theirs were recorded."""
        own = self.mean_extra("cpu_seconds")
        return None if own is None else own + (self.mean_extra("worker_cpu_seconds") or 0.0)

    @functools.cached_property
    def own_cpu(self) -> float | None:
        """The same of the training process alone; None where its workers' part was not recorded."""
        theirs = 0.0 if self.workers == 0 else self.mean_extra("worker_cpu_seconds")
        return None if theirs is None else self.mean_extra("cpu_seconds")

    @property
    def workers_part(self) -> float | None:
        """The data workers' share of all CPU time of training; None where it was not recorded."""
        own = self.own_cpu
        return 1 - own / self.all_cpu if own is not None and self.workers and self.all_cpu else None

    @functools.cached_property
    def images_per_micro_batch(self) -> int | None:
        """Images that a process passes through the model at once."""
        each, whole = self.settings.get("batch_size_per_device"), self.settings.get("global_batch_size")
        if isinstance(each, int):
            return each
        return whole // self.world_size if isinstance(whole, int) and self.world_size else None

    @functools.cached_property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step."""
        whole, each = self.settings.get("global_batch_size"), self.images_per_micro_batch
        return max(1, whole // (each * self.world_size)) if isinstance(whole, int) and each and self.world_size else 1

    @property
    def why_no_steps(self) -> str:
        return self.measurements.not_measured.get("steps", "no step timeline was found")

    @property
    def why_no_hosts(self) -> str:
        return self.measurements.not_measured.get("system", "no system metrics (profiler-output) were found")

    def why_no_series(self, name: str) -> str:
        """Why a series of the hosts is missing."""
        return self.measurements.not_measured.get(name, self.why_no_hosts)

    def why_not(self, name: str) -> str:
        """Why a phase or another number of the steps is missing."""
        if not self.ranks:
            return self.why_no_steps
        return self.measurements.not_measured.get(name, f"{name} was not recorded")
