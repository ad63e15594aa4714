"""What these tests share: each of the decoders in turn, as where the faster ones are not installed; hosts of any size; a disk, and a teacher."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.entrypoints.control_groups import groups
from tests.entrypoints.ranks import from_clean_forks

# data workers are forks: of a process with threads they may hang
multiprocessing.set_start_method("forkserver", force=True)

DECODERS = {
    "simplejpeg": "simplejpeg",
    "OpenCV": "OpenCV (simplejpeg is not installed)",
    "Pillow": "Pillow (neither simplejpeg nor OpenCV is installed)",
}
"""What jpeg.find_decoder calls them."""


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Ranks, data workers and loader processes have one parent, whichever of them a test starts first."""
    from_clean_forks()


@pytest.fixture(params=DECODERS)
def decoder(request, monkeypatch) -> Iterator[str]:
    """The name of the only decoder that can be imported, beside Pillow and what is slower."""
    from training.data.decode import jpeg

    missing = {"simplejpeg": [], "OpenCV": ["simplejpeg"], "Pillow": ["simplejpeg", "cv2"]}[request.param]
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    for cached in (jpeg.opencv, jpeg.find_decoder):
        cached.cache_clear()
    yield request.param
    for cached in (jpeg.opencv, jpeg.find_decoder):
        cached.cache_clear()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Callable[..., None]:
    """Makes this host one that gives the process N cores: bound to it, and of a container's quota."""
    from launcher_observer.system import host

    def make(bound: int, quota: float | None = None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
        files = {} if quota is None else {"box/cpu.max": f"{int(quota * 100_000)} 100000"}
        found = groups(tmp_path, "0::/box\n", **files)
        monkeypatch.setattr(host, "cgroup_quotas", functools.partial(host.cgroup_quotas, **found))

    return make


@pytest.fixture
def disk(tmp_path: Path, monkeypatch) -> Path:
    """This host's own disk, for copies of shards and for indices that were made here."""
    from training.data.sources import shard_cache

    from tests.entrypoints.shard_channels import disk_at

    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setattr(shard_cache, "tempfile", disk_at(folder))
    return folder


@pytest.fixture
def trained(tmp_path: Path):
    """A small teacher; its files are in the folder model."""
    from tests.entrypoints.teachers import exported

    return exported(tmp_path / "model")
