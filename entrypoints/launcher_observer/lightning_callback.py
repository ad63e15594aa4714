"""Observes a Lightning `Trainer` in an interpreter started without the launcher: in a notebook, or in your own container.

trainer = Trainer(…, callbacks=[LauncherCallback()])
"""

from __future__ import annotations

from lightning.pytorch import Callback

from launcher_observer.start import start


class LauncherCallback(Callback):
    """Create it before the data loaders, so that their lines are known.

    It records in $LAUNCHER_OBSERVER_FOLDER, an existing folder, or in a SageMaker job's output. It does nothing if there is neither, or
    if the process is already observed.
    """

    def __init__(self) -> None:
        start()
