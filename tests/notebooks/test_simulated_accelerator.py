"""The simulated accelerator: its clock, its queue, its events, and that the observer and the diagnosis take it for a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time

import pytest

from launcher.insight.evidence import Evidence
from launcher.insight.measurements import read
from tests.notebooks.executing import NOTEBOOKS

FAST = ("--epochs", "2", "--steps", "12", "--workers", "1", "--threads-a-worker", "1", "--cpu-ms-an-image", "0.1")


class Host:
    """A clock that only the device's waits, and the test, let go on."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module")
def simulated():
    sys.path.insert(0, str(NOTEBOOKS))
    yield importlib.import_module("simulated_accelerator")
    sys.path.remove(str(NOTEBOOKS))


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def device(simulated, host):
    return simulated.Accelerator(lambda: host.now, host.sleep)


def test_kernels_run_in_order_and_launches_do_not_wait(device, host):
    for seconds in (0.2, 0.3):
        device.launch(seconds)
    assert host.now == 0 and device.idle_from() == 0.5
    host.now = 0.4
    assert device.busy_seconds() == pytest.approx(0.4)
    device.synchronize()
    assert host.now == device.busy_seconds() == 0.5
    host.now = 2.0  # it idled since
    device.launch(1.0)
    assert device.idle_from() == 3.0 and device.busy_seconds() == 0.5


def test_a_launch_waits_for_room_in_the_queue(device, host, simulated):
    for _ in range(simulated.QUEUE):
        device.launch(0.5)
    assert host.now == 0
    device.launch(0.5)
    assert host.now == 0.5  # when the first one is done


def test_a_launch_costs_the_threads_own_time_on_a_core(device):
    before = time.thread_time()
    device.launch(0, cpu_seconds=0.05)
    assert time.thread_time() - before >= 0.05


def test_events_tell_the_devices_time(device, host):
    begin, end = (device.Event(enable_timing=True) for _ in range(2))
    host.now = 1.0
    begin.record()
    device.launch(0.25)
    end.record()
    assert begin.query() and not end.query()
    assert begin.elapsed_time(end) == pytest.approx(250)
    end.synchronize()
    assert host.now == 1.25 and end.query()


def test_memory_ends(device, simulated):
    device.allocate(simulated.MEMORY)
    with pytest.raises(simulated.torch.OutOfMemoryError, match="sim out of memory"):
        device.allocate(1)
    assert device.max_memory_allocated() == simulated.MEMORY


TENSORS = """
import threading, torch, simulated_accelerator
from torch import nn

device = simulated_accelerator.install()
layers = simulated_accelerator.Kernels(2, 4, launch_seconds=0, seconds_a_sample=0.001)
model = nn.Sequential(nn.Linear(3, 2), layers).to(device)
assert all(parameter.device == device and isinstance(parameter, nn.Parameter) for parameter in model.parameters())

launched = []
torch.sim.launch = lambda seconds, cpu_seconds=0.0: launched.append((seconds, threading.get_ident()))
waited = []
torch.sim.synchronize = lambda device=None: waited.append(device)
main = threading.get_ident()

inputs = torch.ones(5, 3).to(device)
assert inputs.device == device and not inputs.is_cpu and len(launched) == 1, "a copy"
launched.clear()
with torch.autocast("sim", dtype=torch.bfloat16):
    loss = model(inputs).sum()
assert launched == [(0.005, main)] * 2
loss.backward()
assert [seconds for seconds, _ in launched] == [0.005] * 6
assert {thread for _, thread in launched[2:]} not in ({main}, set()) and main not in {thread for _, thread in launched[2:]}
optimizer = torch.optim.AdamW(model.parameters())
optimizer.step()
launched.clear()
assert model(inputs).sum().device == device and launched == [(0.010, main)] * 2, "fp32"

assert not waited
assert loss.item() == loss.tolist() and len(waited) == 2
there = inputs.to("cpu")
assert type(there) is torch.Tensor and there.is_cpu and len(waited) == 3
assert torch.equal(there, torch.ones(5, 3)) and type(torch.ones(1).to(torch.float64)) is torch.Tensor
"""


def test_tensors_and_parameters_are_on_the_device_and_autograd_launches_from_its_own_thread():
    subprocess.run([sys.executable, "-c", TENSORS], cwd=NOTEBOOKS, check=True)


def test_the_observer_and_the_diagnosis_take_it_for_a_gpu(store):
    # long enough for samples of the device, whatever the machine does
    script = [sys.executable, str(NOTEBOOKS / "simulated_training.py"), *FAST, "--kernel-us", "100", "--steps", "30"]
    watch = [sys.executable, "-m", "launcher", "watch", "--", *script]
    done = subprocess.run(watch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    iteration = r"^\d+ iter time - dataloader: \S+ sec, forward: \S+ sec, backward: \S+ sec$"
    assert len(re.findall(iteration, done.stdout, re.MULTILINE)) == 60
    [plan] = store.glob("*/plan.json")
    measured = read(str(plan.parent))
    assert (measured.facts["device"], measured.facts["device_name"]) == ("sim", "Simulated accelerator")
    evidence = Evidence(measured)
    assert {*evidence.phases} == {"data_wait", "host_to_device", "forward", "backward", "optimizer"}
    # two thirds of the kernels are the backward pass's; by the device's time, the host may be through at once
    assert evidence.phases["backward"] > evidence.phases["forward"] > 0
    assert evidence.on_gpu and {*evidence.gpu_means} == {"algo-1 gpu0"} and 0 < evidence.gpu_means["algo-1 gpu0"] <= 100
    assert evidence.gpu_memory == pytest.approx(100 * 32 * 12 * 20 / 2**14, abs=0.01)
    assert evidence.settings["precision"] == "bf16" and not measured.unreadable
    [step] = [part for part in measured.script.parts if part.of == "step"]
    assert step.at.text == "optimizer.step()"
