"""DALI for the device: the graph of the real one computes on the CPU, and its pixels come out on `gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from training.data.dali import graph as dali_graph

from tests.device.stand_in.kernels import on_device


class _Pixels:
    """A batch in the graph's own memory."""

    def __init__(self, made: Any):
        self._pixels = torch.from_numpy(np.array(made.as_array()))

    def as_tensor(self) -> _Pixels:
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, 0

    def __dlpack__(self, **_: object) -> object:
        return torch._C._to_dlpack(on_device(self._pixels))

    def release(self) -> None:
        self._pixels.zero_()


class _Graph:
    """A graph whose outputs are on the device until they are released."""

    def __init__(self, graph: Any):
        self._graph = graph
        self._shared: tuple[_Pixels, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def share_outputs(self) -> tuple[_Pixels, ...]:
        self._shared = tuple(_Pixels(made) for made in self._graph.share_outputs())
        return self._shared

    def release_outputs(self) -> None:
        self._graph.release_outputs()
        for pixels in self._shared:
            pixels.release()


def use(patch: pytest.MonkeyPatch) -> None:
    """Have graphs that are built for a GPU be such ones."""
    build = dali_graph.build

    def built(*args: Any, device_id: int | None, **options: Any) -> Any:
        graph = build(*args, device_id=None, **options)
        return graph if device_id is None else _Graph(graph)

    patch.setattr(dali_graph, "build", built)
