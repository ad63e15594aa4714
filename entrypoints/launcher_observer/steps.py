"""Shows the observer the batches of a plain training loop, whatever loads them.

    from launcher_observer.steps import launcher_steps

    for images, labels in launcher_steps(loader):
        …

PyTorch's DataLoader is seen without it. It is for other loaders, and for an interpreter that was started without the launcher: in a
notebook, or in your own container.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launcher_observer.batches import Batch, Batches
from launcher_observer.start import start
from launcher_observer.torch_hooks import current


def launcher_steps(batches: Iterable[Batch]) -> Iterator[Batch]:
    """One pass over the same batches; import torch before.

    It records in $LAUNCHER_OBSERVER_FOLDER, an existing folder, or in a SageMaker job's output. With neither it only passes them on.
    """
    start()
    iterator, observer = Batches(batches), current()
    if observer is not None:
        observer.guarded(observer.passes_over, iterator, batches)
    return iterator
