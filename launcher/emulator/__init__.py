"""SageMaker's far side on this machine, for tests, notebooks and CI: moto, and beside it what carries out the training jobs.

from launcher.emulator import Emulator

with Emulator(Path("far-side")) as emulator:
    os.environ.update(emulator.environment)
    ...                              # boto3, the SageMaker SDK and this kit now talk to it
"""

from launcher.emulator.emulator import Emulator

__all__ = ["Emulator"]
