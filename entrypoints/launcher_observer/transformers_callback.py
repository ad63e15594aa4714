"""Observes a `transformers.Trainer` in an interpreter started without the launcher: in a notebook, or in your own container.

trainer = Trainer(…, callbacks=[LauncherCallback()])
"""

from __future__ import annotations

from transformers import TrainerCallback

from launcher_observer.start import start


class LauncherCallback(TrainerCallback):
    """Create it before the Trainer, so that its loaders and optimizers are seen as they are made.

    It records in $LAUNCHER_OBSERVER_FOLDER, an existing folder, or in a SageMaker job's output. It does nothing if there is neither, or
    if the process is already observed.
    """

    def __init__(self) -> None:
        start()
