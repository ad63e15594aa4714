"""These tests run in a process of their own: the device type `gpu`, once registered, is there for every test of a process.

pytest tests/device       runs them
pytest                    runs test_apart.py, which starts that
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.device import device_lines

if TYPE_CHECKING:
    from tests.device.runs import Runs

HERE = Path(__file__).parent
APART = HERE / "test_apart.py"


def pytest_configure(config: pytest.Config) -> None:
    if _alone(config):
        device_lines.watch()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_"):
        return None
    return (collection_path == APART) == _alone(config) or None


def pytest_testnodedown(node: object, error: object) -> None:
    """The lines that a worker of pytest-xdist has seen."""
    device_lines.seen.update(map(tuple, getattr(node, "workeroutput", {}).get("device lines", ())))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After all tests of this folder, each line of the product that is there for a GPU has run."""
    config = session.config
    if not _alone(config):
        return
    if hasattr(config, "workeroutput"):
        config.workeroutput["device lines"] = [*device_lines.seen]
        return
    chosen = any(config.getoption(name, None) for name in ("keyword", "markexpr", "deselect", "lf", "collectonly"))
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if [*map(Path.absolute, map(Path, config.args))] != [HERE] or chosen or not ended:
        return
    device_lines.found = device_lines.problems()
    if device_lines.found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Beneath the summary, which counts tests alone: a run that ends with `190 passed` and a failure says why."""
    if device_lines.found:
        config.get_terminal_writer().write("\n".join(device_lines.found) + "\n", red=True)


def _alone(config: pytest.Config) -> bool:
    """Whether this process runs nothing but tests of this folder."""
    asked = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    return all(HERE in (path, *path.parents) for path in asked)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The stand-in GPU."""
    from tests.device import stand_in

    return stand_in.install()


@pytest.fixture(autouse=True)
def _memory_stays_while_a_stream_uses_it(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "gpu" in request.fixturenames:
        from tests.device.stand_in import streams

        found, streams.unsafe[:] = [*streams.unsafe], []
        assert found == []


@pytest.fixture(scope="session")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Channels of labelled images, of images with masks, and of teachers of both."""
    from tests.device.runs import make_channels

    return make_channels(tmp_path_factory.mktemp("channels"))


@pytest.fixture
def runs(gpu: torch.device, channels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs the entry scripts on either device."""
    from tests.device.runs import Runs

    return Runs(gpu, channels, tmp_path, monkeypatch)
