"""SageMaker emulator on this machine, for tests, notebooks and CI: moto plus an executor of training jobs.

`start` makes one that holds everything that given configs name.
"""

from launcher.emulator.emulator import Emulator
from launcher.emulator.serving import start

__all__ = ["Emulator", "start"]
