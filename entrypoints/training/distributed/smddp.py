"""SageMaker's distributed data parallel library (SMDDP): whether a job asks for it, whether it is there, and its older API."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

import torch.distributed as dist
from launcher_observer.contract import contract_value
from torch import nn

from training.distributed.rendezvous import Place

BACKEND = "smdistributed.dataparallel.torch.torch_smddp"
"""Adds the backend smddp to torch.distributed: https://docs.aws.amazon.com/sagemaker/latest/dg/data-parallel-modify-sdp-pt.html"""

OLDER_API = "smdistributed.dataparallel.torch.distributed"
"""The library's own version of torch.distributed's functions, before 1.4.0:
doc/api/training/sdp_versions/v1.2.x/smd_data_parallel_pytorch.rst of https://github.com/aws/sagemaker-python-sdk"""


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the job's distribution is smdistributed: the toolkit passes on the hyperparameter that the SDK adds for it."""
    parameters = contract_value(environ, "SM_FRAMEWORK_PARAMS", {})
    return str(parameters.get("sagemaker_distributed_dataparallel_enabled")).lower() == "true"


def find(place: Place) -> tuple[ModuleType | None, str]:
    """The module with the library's collectives (torch.distributed, or before 1.4 its own), None if it is of no use; and the reason."""
    if place.launcher != "mpirun":
        # "Considerations" in https://docs.aws.amazon.com/sagemaker/latest/dg/data-parallel-framework-estimator.html
        return None, f"under {place.launcher} its AllReduce falls back to NCCL"
    try:
        try:
            importlib.import_module(BACKEND)
        except ModuleNotFoundError as error:
            if error.name != BACKEND:
                raise
            return importlib.import_module(OLDER_API), "the job asks for it, and its version is before 1.4"
    except Exception as error:  # of any type: from 2.3.0 on the import refuses instance types
        return None, f"{type(error).__name__}: {error}"
    return dist, "the job asks for it"


def older_data_parallel(model: nn.Module) -> nn.Module:
    """The model wrapped by the library before 1.4, which does not broadcast buffers."""
    module = importlib.import_module("smdistributed.dataparallel.torch.parallel.distributed")
    wrapped: nn.Module = module.DistributedDataParallel(model, broadcast_buffers=False)
    return wrapped
