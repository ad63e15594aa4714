"""Reads the jobs that users start with SageMaker's SDK, version 2 or 3, from their scripts and notebooks."""

from __future__ import annotations

from launcher.sdk_import.estimator import EstimatorImporter
from launcher.sdk_import.importer import Imported
from launcher.sdk_import.objects import Estimator
from launcher.sdk_import.source import Source
from launcher.sdk_import.trainer import TrainerImporter
from launcher.show.text import listed


def config_of(estimator: Estimator, source: Source) -> Imported:
    """The config of one estimator: its job's values, what could not be read, and what differs."""
    kind = TrainerImporter if estimator.made.short == "ModelTrainer" else EstimatorImporter
    made = kind(source).read(estimator)
    if source.skipped:
        cells = listed(str(cell) for cell in source.skipped)
        several = len(source.skipped) > 1
        made.notes.append(f"cell{'s' * several} {cells} {'are' if several else 'is'} no Python, and not read")
    return made
