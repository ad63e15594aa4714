"""These tests run in a process of their own: the device type `gpu`, once registered, is there for every test of a process.

pytest tests/device       runs them
pytest                    runs test_apart.py, which starts that
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.device import stand_in
from tests.device.runs import Runs, make_channels

HERE = Path(__file__).parent
APART = HERE / "test_apart.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    return (collection_path == APART) == _alone(config) or None


@functools.cache
def _alone(config: pytest.Config) -> bool:
    """Whether this process runs nothing but tests of this folder."""
    asked = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    return all(HERE in (path, *path.parents) for path in asked)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The stand-in GPU."""
    return stand_in.install()


@pytest.fixture(scope="session")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Channels of labelled images, of images with masks, and of teachers of both."""
    return make_channels(tmp_path_factory.mktemp("channels"))


@pytest.fixture
def runs(gpu: torch.device, channels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs the entry scripts on either device."""
    return Runs(gpu, channels, tmp_path, monkeypatch)
