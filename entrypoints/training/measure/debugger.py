"""SageMaker Debugger's tensor hook (smdebug), if a job asks for it and its image has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from torch import nn

CONFIG = "/opt/ml/input/config/debughookconfig.json"
"""SageMaker writes it for a job with `debugger`, and smdebug looks there unless SMDEBUG_CONFIG_FILE_PATH names another."""


def register_hook(model: nn.Module, log: Callable[[str], None], environ: Mapping[str, str] = os.environ) -> None:
    """Make smdebug save what the job's `debugger` section names. If it cannot, it logs that, and training continues.

    Args:
        model: the trained one, not wrapped.
        log: prints one line.
    """
    file = Path(environ.get("SMDEBUG_CONFIG_FILE_PATH", CONFIG))
    if not file.is_file():
        return
    try:
        import smdebug.pytorch

        if not hasattr(np.ndarray, "tostring"):  # smdebug 1.0.34 saves by it, in the middle of a forward pass
            raise ImportError(f"it needs numpy below 2.3, but the image has {np.__version__}")
        hook = smdebug.pytorch.Hook.create_from_json_file(str(file))
        hook.register_module(model)
    except Exception as error:  # the image has no smdebug, or one that does not fit its torch, protobuf or Python
        log(f"Debugger's hook was requested ({file}) but cannot be loaded: {type(error).__name__}: {error}")
        return
    log(f"Debugger's hook saves tensors, as {file.name} says")
