"""What do fewer bits of a teacher's features cost the losses that use them? `make bench-bank`: the loss and its gradient, by precision.

The teacher is DINOv2 ViT-S/14 with published weights; the pictures are 48 of those in vit_distillation.py. A student's features are
the teacher's with Gaussian noise: close ones, and ones that a light student reaches. Needs Debian's package tuxpaint-stamps-default.
"""

from __future__ import annotations

from typing import get_args

import engine  # noqa: F401  # finds the entry scripts' modules
import numpy as np
import torch
from PIL import Image
from training.models import timm_models
from training.settings.features import FeatureSettings
from training.tasks.feature_losses import feature_loss
from training.teacher.feature_format import FeatureFormat, FeaturePrecision
from training.teacher.feature_records import pack_features, unpack_features
from training.teacher.frozen import FrozenModel
from vit_distillation import PICTURES, PREPARED, WEIGHTS

from launcher.prepare import prepare
from launcher.prepare.published_weights import published_weights

SIZE, COUNT, NAME = 112, 48, "vit_small_patch14_dinov2"
NOISE = (0.3, 1.0)
"""Of the student's features, in standard deviations of the teacher's."""
LOSSES = {"pooled": ("cosine", "smooth_l1", "relational"), "tokens": ("cosine", "smooth_l1")}


def pictures() -> torch.Tensor:
    """uint8 (COUNT, 3, SIZE, SIZE)."""
    files = sorted(PREPARED.glob("*/*/*"))
    chosen = files[:: max(1, len(files) // COUNT)][:COUNT]
    arrays = [np.array(Image.open(file).convert("RGB").resize((SIZE, SIZE))) for file in chosen]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


def moved(
    student: torch.Tensor, teacher: torch.Tensor, kept: torch.Tensor, how: FeatureSettings
) -> tuple[float, float]:
    """The relative change of the loss, and of its gradient, due to kept features."""
    losses = [feature_loss(student, taught, how) for taught in (teacher, kept)]
    first, second = (torch.autograd.grad(loss, student)[0] for loss in losses)
    return (losses[1] / losses[0] - 1).item(), ((second - first).norm() / first.norm()).item()


def main() -> None:
    print(prepare(PICTURES, PREPARED, size=96))
    print(published_weights("dinov2-small", WEIGHTS))
    images, options = pictures(), {"img_size": SIZE}
    inner = timm_models.create(
        NAME, options, pretrained_cfg_overlay={"file": str(WEIGHTS / "model.safetensors")}, pretrained=True
    )
    model = timm_models.normalize(inner, inner.pretrained_cfg, options)
    print(
        "| features | loss | its value | precision | loss moved by | gradient moved by |\n|---|---|---:|---|---:|---:|"
    )
    for level, losses in LOSSES.items():
        teacher = FrozenModel(model, NAME, options, features=level)
        features = torch.cat([teacher.with_features(part)[1] for part in images.split(16)])
        for loss in losses:
            base = torch.nn.functional.layer_norm(features, features.shape[-1:]) if loss == "smooth_l1" else features
            for noise in NOISE:
                drawn = torch.randn(base.shape, generator=torch.Generator().manual_seed(0))
                student = (base + noise * base.std() * drawn).requires_grad_()
                how = FeatureSettings(loss=loss, level=level)
                for precision in get_args(FeaturePrecision):
                    kept = FeatureFormat(level, tuple(features.shape[1:]), precision)
                    answers = unpack_features(kept, pack_features(kept, features))
                    of_loss, of_gradient = moved(student, features, answers, how)
                    value = feature_loss(student, features, how).item()
                    print(f"| {level} | {loss} | {value:.3f} | {precision} | {of_loss:+.2%} | {of_gradient:.2%} |")


if __name__ == "__main__":
    main()
