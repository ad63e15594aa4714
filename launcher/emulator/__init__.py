"""SageMaker's far side on this machine, for tests, notebooks and CI: moto, and beside it what carries out the training jobs.

`start` makes one that has what some configs name.
"""

from launcher.emulator.emulator import Emulator
from launcher.emulator.serving import start

__all__ = ["Emulator", "start"]
