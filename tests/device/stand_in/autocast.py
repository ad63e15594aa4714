"""Autocast on `gpu`, with the operators that it casts on CUDA: https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float16"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LOWER = (
    *(
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "_convolution",
        "conv_transpose2d.input",
        "linear",
        "matmul",
        "mm",
        "mv",
        "bmm",
    ),
    *("addmm", "addmv", "addbmm", "baddbmm", "einsum", "prelu", "scaled_dot_product_attention"),
)
"""Computed in autocast's own type."""

FULL = (
    *(
        "layer_norm",
        "native_layer_norm",
        "group_norm",
        "nll_loss",
        "nll_loss2d",
        "nll_loss_nd",
        "kl_div",
        "mse_loss",
        "l1_loss",
    ),
    *("smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "cosine_similarity", "cross_entropy_loss"),
    *(
        "exp",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "reciprocal",
        "rsqrt",
        "logsumexp",
        "softplus",
        "pow.Tensor_Scalar",
    ),
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "cumsum", "linalg_vector_norm"),
    *("upsample_bilinear2d", "upsample_bilinear2d.vec", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa.vec"),
)
"""Computed in float32. Operators with a dtype argument only where it is not given."""

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Have PyTorch cast by these lists under `torch.autocast("gpu")`."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for names, dtype in ((LOWER, lambda: torch.get_autocast_dtype("gpu")), (FULL, lambda: torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _kernel(op, dtype), "AutocastPrivateUse1")
    _libraries.extend([others, library])


def _kernel(op: Any, wanted: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            eligible = value.is_floating_point() and value.device.type == "gpu" and value.dtype != torch.float64
            return value.to(dtype) if eligible else value
        return [cast(item, dtype) for item in value] if isinstance(value, (list, tuple)) else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = wanted()
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            if kwargs.get("dtype") is not None:
                return op(*args, **kwargs)
            return op(*cast(args, dtype), **{name: cast(value, dtype) for name, value in kwargs.items()})

    return kernel
