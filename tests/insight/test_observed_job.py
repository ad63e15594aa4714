"""A job with a script of the user's own, run through the toolkit and unchanged: its diagnosis names the line that is slow."""

from __future__ import annotations

import launcher

SCRIPT = """
    import argparse
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset


    class Slow(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            time.sleep(0.01)  # a far disk
            return torch.ones(8), index % 2


    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    loader = DataLoader(Slow(), batch_size=4, num_workers=options.workers)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for samples, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(samples), labels)
            loss.backward()
            optimizer.step()
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def test_the_slow_line_of_a_script_that_knows_nothing_of_the_kit_is_named(script_job):
    job = script_job(SCRIPT, hyperparameters={"workers": 0}, profiling={"system_interval_ms": 100})
    run = launcher.run(launcher.plan(job))
    assert run.wait(120) == "Completed", "\n".join(line for _, line in run.logs())
    found = run.diagnose()
    top = found.findings[0]
    # full cores of other programs hide that the process itself waits
    assert top.kind in ("storage_bound", "data_bound") and top.share > 0.5, str(found)
    assert (top.at.file, top.at.line) == ("script.py", line_of("time.sleep")), str(found)
    settings = found.measurements.settings
    assert settings["num_workers"] == 0 and settings["global_batch_size"] == 4
    assert settings["hyperparameters.workers"] == 0 and found.measurements.script.by_launcher
    assert found.measurements.script.loader("training").at.line == line_of("loader = DataLoader")
    assert f"at script.py:{top.at.line} (" in found.headline
