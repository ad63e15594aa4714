"""A stand-in for NVIDIA's management library, which comes with the driver. It needs a C compiler and no torch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
static char devices[3];
int nvmlInit_v2(void) { return getenv("NVML_FAILS") ? 9 : 0; }
const char *nvmlErrorString(int status) { return status == 9 ? "Driver Not Loaded" : status == 4 ? "Insufficient Permissions" : "GPU is lost"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = devices + index; return 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **device) { *device = devices + 2; return strcmp(name, "GPU-two") ? 2 : 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    if (device == devices + 1) return 3;
    strncpy(uuid, device == devices ? "GPU-zero" : "GPU-two", length); return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *found) {
    if (device == devices + 1) return 3;
    if (getenv("NVML_DENIES")) return 4;
    found->gpu = 40 + ((char *)device - devices); found->memory = 1; return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *found) {
    if (getenv("NVML_LOSES") && device == devices + 2) return 15;
    found->total = 1ull << 36; found->used = (1ull << 34) * (1 + ((char *)device - devices)); found->free = 0; return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    *reasons = device == devices ? 0x40 : 0x4; return 0;
}
"""
"""Three GPUs: the first too hot, the second cut into parts so that nobody knows its utilisation, the third at its power cap."""


def build(folder: Path) -> Path:
    """The folder with the library; processes find it there by LD_LIBRARY_PATH."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "a C compiler is needed: apt-get install gcc"
    folder.mkdir()
    source = folder / "nvml.c"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True)
    return folder
