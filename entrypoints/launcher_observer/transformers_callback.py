"""Observes a `transformers.Trainer` whose interpreter was started without the launcher: in a notebook, or in a container of one's own.

trainer = Trainer(…, callbacks=[LauncherCallback()])
"""

from __future__ import annotations

from transformers import TrainerCallback

from launcher_observer.start import start


class LauncherCallback(TrainerCallback):
    """Make it before the Trainer, so that its loaders and optimizers are seen as they are made.

    It records in $LAUNCHER_OBSERVER_FOLDER, an existing folder, or in a SageMaker job's output. With neither it does nothing; nor does
    it where the process is observed already.
    """

    def __init__(self) -> None:
        start()
