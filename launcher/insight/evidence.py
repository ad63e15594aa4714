"""The numbers that rules use, derived from a run's measurements: shares of a step, busy cores, idle GPUs."""

from __future__ import annotations

import functools

import numpy as np

from launcher.insight.host_evidence import FEW_SAMPLES, HostEvidence
from launcher.insight.measurements import Host

IDLE_GPU = 0.3
"""Idle share of a GPU from which something starves it: the threshold of Debugger's LowGPUUtilization, 70 % use."""

UNEVEN = 30.0
"""Percentage points between the means of the most and the least used GPU from which use is uneven. Debugger's LoadBalancing compares
histograms without values above 98 %."""


class Evidence(HostEvidence):
    """Derived numbers of one run; None: not measured.

    Shares are of the time of a usual step: without the first steps, rare outliers, stalls between steps, and the start. Means of hosts'
    records, such as GPU and core use, are over usual steps too. Multiplied by `steps_part`, they are shares of the training time.
    """

    @functools.cached_property
    def slow_steps_too(self) -> Evidence:
        """The same run with its hosts' samples in outliers too, which the numbers of `mean_extra` include: what keeps a thread from its
        core may do so in a few steps only, and for long, such as workers that all make their first batches."""
        return self if self.slow else Evidence(self.measurements, slow=True)

    # GPUs

    @functools.cached_property
    def all_gpu_means(self) -> dict[str, float]:
        """Mean utilisation in usual steps of every GPU of the hosts, in percent, by `host gpu`, also of those that the run does not use."""
        return {
            f"{host.name} {name}": float(values.mean())
            for host in self.hosts
            for name, series in host.gpus.items()
            if len(values := self.sampled(series))
        }

    @functools.cached_property
    def gpu_means(self) -> dict[str, float]:
        """The same for the run's own GPUs. On a host whose ranks were timed these are the ranks' devices; if it was not recorded which, the
        busiest ones, one for each rank: wrong where others use the machine too."""
        if self.facts.get("device") == "cpu":
            return {}
        own: dict[str, float] = {}
        for host in self.hosts:
            here = {name: mean for name, mean in self.all_gpu_means.items() if name.startswith(f"{host.name} ")}
            devices = self._devices(host)
            if devices is None:
                ranks = self.local_ranks(host) if self.ranks else None
                devices = {*sorted(here, key=here.__getitem__, reverse=True)[:ranks]}
            own |= {name: mean for name, mean in here.items() if name in devices}
        return own

    def _devices(self, host: Host) -> set[str] | None:
        """`host gpu` of each device that the host's ranks train on; None: a rank's, or that of a GPU, was not recorded."""
        names = {_plain(uuid): f"{host.name} {name}" for name, uuid in host.gpu_uuids.items()}
        uuids = [steps.device_uuid for steps in self.ranks if steps.host == host.name]
        devices = {names.get(_plain(uuid)) for uuid in uuids if uuid is not None}
        known = {name for name in devices if name is not None}
        return known if known and known == devices and None not in uuids else None

    @functools.cached_property
    def gpu_idle(self) -> float | None:
        """Mean share of usual steps in which no kernel ran, over the run's GPUs, 0 to 1; None: no GPU was watched, or too briefly."""
        return 1 - float(np.mean(list(self.gpu_means.values()))) / 100 if self.gpu_means else None

    @property
    def uneven(self) -> bool:
        """Whether some GPUs are used much more than others, or not at all."""
        means = self.all_gpu_means.values()
        return len(means) > 1 and max(means) - min(means) >= UNEVEN

    @functools.cached_property
    def gpu_memory(self) -> float | None:
        """Memory use of the fullest of the run's GPUs, its 95th percentile in percent."""
        highest = [
            float(np.percentile(values, 95))
            for host in self.hosts
            for name, series in host.gpu_memory.items()
            if (not self.gpu_means or f"{host.name} {name}" in self.gpu_means) and len(values := self.sampled(series))
        ]
        return max(highest) if highest else None

    @property
    def on_gpu(self) -> bool:
        # if the device is not known, watched GPUs count
        return self.facts.get("device") == "cuda" or bool(self.gpu_means)

    @property
    def worker_threads(self) -> bool:
        """Whether data workers are threads of the training process."""
        kind = self.settings.get("worker_type")
        return kind == "threads" or (kind == "auto" and not self.on_gpu)

    @functools.cached_property
    def loop_share(self) -> float | None:
        """Share of a step in the loop's own Python: in no phase, or, if that is more, sampled there in an observed script, whose phase
        `forward` holds all that happens between a batch's arrival and the backward pass. On a GPU samples do not count: the thread may
        just wait for it. None if neither is known."""
        if self.script is None or self.on_gpu:
            return self.unaccounted
        sampled = self.script.loop_share
        return max(self.unaccounted, sampled) if self.unaccounted is not None else sampled or None

    # Settings and facts

    @functools.cached_property
    def workers(self) -> int | None:
        """Data workers per training process, as they ran; 0 if other hosts make the images; None: not known."""
        if self.remote:
            return 0
        for value in (self.settings.get("num_workers"), self.facts.get("num_workers")):
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    @functools.cached_property
    def worker_use(self) -> float | None:
        """Cores that one data worker keeps busy, 0 to 1; an upper bound if the training process's own part is not known. None if no CPU
        time was measured."""
        seconds = self.mean_extra("worker_cpu_seconds")
        cores = self.cores_used(self.all_cpu if seconds is None else seconds)
        return cores / self.workers if cores is not None and self.workers else None

    @functools.cached_property
    def all_cpu(self) -> float | None:
        """CPU seconds per step of the training process and its workers, the workers' only if recorded."""
        own = self.mean_extra("cpu_seconds")
        return None if own is None else own + (self.mean_extra("worker_cpu_seconds") or 0.0)

    @functools.cached_property
    def own_cpu(self) -> float | None:
        """The same for the training process alone; None if its workers' part was not recorded."""
        theirs = 0.0 if self.workers == 0 else self.mean_extra("worker_cpu_seconds")
        return None if theirs is None else self.mean_extra("cpu_seconds")

    @property
    def workers_part(self) -> float | None:
        """The data workers' share of all CPU time of training; None if it was not recorded."""
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
        watched = [series for host in self.hosts for series in (*host.cores.values(), *host.gpus.values())]
        if watched and not any(len(self.sampled(series)) for series in watched):
            return f"fewer than {FEW_SAMPLES} samples of the hosts while usual steps ran"
        return self.measurements.not_measured.get("system", "no system metrics (profiler-output) were found")

    def why_no_series(self, name: str) -> str:
        """Why a series of the hosts is missing."""
        return self.measurements.not_measured.get(name, self.why_no_hosts)

    def why_not(self, name: str) -> str:
        """Why a phase or another number of the steps is missing."""
        if not self.ranks:
            return self.why_no_steps
        return self.measurements.not_measured.get(name, f"{name} was not recorded")


def _plain(uuid: str) -> str:
    """A GPU's UUID without NVML's prefix, which torch leaves out."""
    return uuid.lower().removeprefix("gpu-")
