"""The GPUs' utilisation and memory, from NVIDIA's management library, which comes with the driver. Standard library only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p, create_string_buffer

LIBRARY = "libnvidia-ml.so.1"
"""The functions: https://docs.nvidia.com/deploy/nvml-api/"""

SUCCESS, NOT_SUPPORTED = 0, 3

UUID_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE: with the 0 at its end."""

HELD_BACK = 0x08 | 0x20 | 0x40 | 0x80
"""nvmlClocksThrottleReason…: HwSlowdown, SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown. The software power cap,
which always applies to a busy GPU, is none of them."""


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class Gpus:
    """This host's GPUs: those that CUDA_VISIBLE_DEVICES shows, or all."""

    def __init__(self, environ: Mapping[str, str] = os.environ):
        """
        Raises:
            OSError: there is no driver, or it does not answer.
        """
        self._library = ctypes.CDLL(LIBRARY)
        self._library.nvmlErrorString.restype = c_char_p
        self._call("nvmlInit_v2")
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(number) for number in range(count.value)] if visible is None else visible.split(",")
        self._devices = [self._device(name.strip()) for name in names if name.strip()]
        self.refused: dict[str, str] = {}
        """The driver's error instead of a value, by GPU and function; not if the GPU has no such value."""
        self._identified = False

    def look(self) -> dict[tuple[str, str, str], float]:
        """Percent by (Type, Name, Dimension); in the first answer also 1.0 by ("identity", the GPU, its UUID), as numbers are all that the
        format has.

        A value that a GPU does not report is left out: a partitioned GPU (MIG) has no utilisation, a container may lack
        permission for a value, and a GPU may be lost while the others work.
        """
        values: dict[tuple[str, str, str], float] = {}
        for number, device in enumerate(self._devices):
            name = f"gpu{number}"
            used, memory, reasons, uuid = _Utilization(), _Memory(), c_ulonglong(), create_string_buffer(UUID_BYTES)
            if not self._identified and self._tells(name, "nvmlDeviceGetUUID", device, uuid, c_uint(UUID_BYTES)):
                values["identity", name, uuid.value.decode("ascii")] = 1.0
            if self._tells(name, "nvmlDeviceGetUtilizationRates", device, byref(used)):
                values["gpu", name, "GPUUtilization"] = used.gpu
            if self._tells(name, "nvmlDeviceGetMemoryInfo", device, byref(memory)):
                values["gpu", name, "GPUMemoryUtilization"] = 100 * memory.used / memory.total
            if self._tells(name, "nvmlDeviceGetCurrentClocksThrottleReasons", device, byref(reasons)):
                values["clocks", "ThrottledPercent", name] = 100.0 * bool(reasons.value & HELD_BACK)
        self._identified = True
        return values

    def _device(self, name: str) -> c_void_p:
        """A GPU by its number, or by its UUID as CUDA_VISIBLE_DEVICES may say it."""
        device = c_void_p()
        if name.isdigit():
            self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(int(name)), byref(device))
        else:
            self._call("nvmlDeviceGetHandleByUUID", c_char_p(name.encode()), byref(device))
        return device

    def _tells(self, gpu: str, function: str, *arguments: object) -> bool:
        """Whether a GPU returns a value; an error is kept in `refused`."""
        status = getattr(self._library, function)(*arguments)
        if status not in (SUCCESS, NOT_SUPPORTED):
            self.refused[f"{gpu} {function}"] = self._words(status)
        return bool(status == SUCCESS)

    def _call(self, function: str, *arguments: object) -> None:
        """Raises OSError with the library's own message on failure."""
        status = getattr(self._library, function)(*arguments)
        if status != SUCCESS:
            raise OSError(f"{function}: {self._words(status)}")

    def _words(self, status: int) -> str:
        words = self._library.nvmlErrorString(status)
        return words.decode() if words else str(status)
