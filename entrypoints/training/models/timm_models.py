"""timm models by name, with their own normalisation inside, so that every model can look at the same pixels."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import timm
import torch
import torch.nn.functional as F
from timm.layers.config import use_fused_attn
from timm.optim import param_groups_weight_decay
from torch import nn

if TYPE_CHECKING:
    from timm.models import FeatureInfo

    class TimmModel(nn.Module):
        """What timm's models have beyond what every module has."""

        num_classes: int
        pretrained_cfg: dict[str, Any]
        default_cfg: dict[str, Any]
        feature_info: FeatureInfo
        """Only of a model that was made with features_only."""


@runtime_checkable
class FusedAttention(Protocol):
    """A timm layer whose attention can be computed in one call."""

    fused_attn: bool
    """Whether it is."""


class Normalized(nn.Module):
    """A model that takes pixels as they are stored.

    Takes uint8 images (batch, channels, height, width), scales them to 0…1, applies the wrapped model's own mean and
    standard deviation, and returns its logits: (batch, classes), or (batch, classes, height, width). That arithmetic is
    float32, whatever `to` made of the wrapped model; the result is cast to the type of the model's weights.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float], image_size: int | None = None):
        """
        Args:
            mean, std: of the pixels in 0…1, a number for each channel.
            image_size: side in pixels of the square that the model takes: images of another size are resized on the device
                (bilinear, antialiased). None: images keep their size.
        """
        super().__init__()
        self.model = model
        self.image_size = image_size
        self.head_alone = False
        """Whether all but the head is frozen, and therefore always in eval mode."""
        self.memory_format = torch.contiguous_format
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(self.normalized(images))
        return logits

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        """The images as the wrapped model takes them."""
        if images.shape[1] != self.mean.shape[1]:  # broadcasting would silently make three channels of one
            raise ValueError(
                f"a model for {self.mean.shape[1]} channels got images with {images.shape[1]}: set in_chans"
            )
        pixels = images.to(torch.float32, memory_format=self.memory_format)
        if self.image_size is not None and images.shape[-2:] != (self.image_size, self.image_size):
            size = (self.image_size, self.image_size)
            pixels = F.interpolate(pixels, size, mode="bilinear", align_corners=False, antialias=True)
        pixels = (pixels / 255).sub_(self.mean).div_(self.std)
        return pixels.to(next(self.model.parameters(), pixels).dtype)

    def train(self, mode: bool = True) -> Normalized:
        super().train(mode)
        if self.head_alone:
            for name, module in self.model.named_modules():
                module.training = mode and is_of_head(self.model, name)
        return self

    def train_head_alone(self) -> None:
        """Freeze all but the head; dropout and BatchNorm of the rest stay in eval mode.

        Raises:
            ValueError: the model has no head of its own.
        """
        frozen = [item for name, item in self.model.named_parameters() if not is_of_head(self.model, name)]
        if len(frozen) == len([*self.model.parameters()]):
            raise ValueError("trained_layers head: timm knows no head of this model; set all")
        for parameter in frozen:
            parameter.requires_grad_(False)
        self.head_alone = True
        self.train(self.training)

    def _apply(self, *arguments: Any, **options: Any) -> Normalized:
        """What `to`, `half`, `cuda` … call: mean and std move with the weights, but keep their precision."""
        mean, std = self.mean, self.std
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]  # torch does not annotate its own
        self.mean, self.std = mean.to(self.mean.device), std.to(self.std.device)
        channels_last = any(only_channels_last(parameter) for parameter in self.model.parameters())
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return self


def only_channels_last(parameter: torch.Tensor) -> bool:
    """Whether a tensor is contiguous in channels-last order alone; one with a single channel or pixel is so in both orders."""
    return (
        parameter.ndim == 4
        and parameter.is_contiguous(memory_format=torch.channels_last)
        and not parameter.is_contiguous()
    )


def build(
    name: str, options: Mapping[str, Any], classes: int, *, pretrained: bool = False, image_size: int | None = None
) -> Normalized:
    """A timm model for N classes.

    Args:
        name: for example vit_small_patch16_224.
        options: more keyword arguments for timm.create_model.
        classes: number of outputs.
        pretrained: start from timm's published weights.
        image_size: as Normalized.

    Raises:
        ValueError: as `create`.
    """
    model = create(name, options, num_classes=classes, pretrained=pretrained)
    return normalize(model, model.pretrained_cfg, options, image_size)


def create(name: str, options: Mapping[str, Any], **more: Any) -> TimmModel:
    """A timm model by its name; `options` and `more` are keyword arguments for timm.create_model.

    Raises:
        ValueError: timm knows no such model, or the model takes no such option; the message names similar ones.
    """
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:5]
        raise ValueError(
            f"timm {timm.__version__} has no model {name}" + (f"; similar: {', '.join(near)}" if near else "")
        )
    try:
        return made_by_timm(name, **more, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be created with {dict(options)}: {error}") from error


def create_for(weights: Mapping[str, torch.Tensor], name: str, options: Mapping[str, Any], **more: Any) -> TimmModel:
    """A timm model with given weights. If the model allows it, random initialisation is skipped, which takes 6 s for a ViT-L/16
    (tests/benchmarks/model_files.py).

    Args:
        weights: all of the model's, by name; they are copied.
        name, options, more: as `create` takes them.

    Raises:
        ValueError: as `create`.
        RuntimeError: the weights are not the model's.
    """
    # Some models cannot be built on the meta device, where no value can be read (RuntimeError; from `create` ValueError), and torch 2.0
    # knows no `assign` (TypeError). Weights that do not fit raise a RuntimeError here too; the second attempt raises it for the caller.
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        with torch.device("meta"):
            model = create(name, options, **more)
        # a file's weights are its mapped memory, which changes if the file is overwritten
        model.load_state_dict({key: value.clone() for key, value in weights.items()}, assign=True)
        if not any(value.is_meta for module in model.modules() for value in _tensors(module)):
            return model
    model = create(name, options, **more)
    model.load_state_dict(weights)
    return model


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """A module's own tensors: parameters, buffers, and those that are plain attributes."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def made_by_timm(name: str, **options: Any) -> TimmModel:
    """timm.create_model, whose annotation promises no more than a module."""
    return cast("TimmModel", timm.create_model(name, **options))


def normalize(
    model: nn.Module, published: Mapping[str, Any], options: Mapping[str, Any], image_size: int | None = None
) -> Normalized:
    """A model with the mean and standard deviation of timm's published configuration, for the channels that `options` asks for."""
    channels = options.get("in_chans", 3)
    mean, std = ([*published[key]] for key in ("mean", "std"))
    if len(mean) != channels:  # timm's numbers are for three channels: one grey channel gets their average
        mean, std = [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels
    return Normalized(model, mean, std, image_size)


def is_of_head(model: nn.Module, name: str) -> bool:
    """Whether a module or a weight of that name belongs to a timm model's classifier, according to timm's published configuration."""
    heads = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else heads
    return any(name == head or name.startswith(f"{head}.") for head in heads)


def convolutional(model: nn.Module) -> bool:
    """Whether channels-last memory order is likely to pay off: most layers are convolutions, and none of them is grouped.

    From timm's own tables of training with AMP in both orders (RTX 3090, torch 1.12,
    https://github.com/huggingface/pytorch-image-models/tree/main/results): of 416 such models the median gains 26 % and a
    tenth gains less than 2 %; the 260 models of mostly linear layers (ViT, Swin, ConvNeXt) gain 1 %; with grouped, but not
    depthwise, convolutions the median loses 16 %, and RegNets train three times slower.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    grouped = any(1 < module.groups < module.in_channels for module in convolutions)
    return len(convolutions) > linear and not grouped


def choose_attention(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Compute timm's attention the faster way: by torch's fused kernel, but for bf16 on CPUs as matrix products and a softmax.

    There, with the 197 tokens of a 224-pixel image, forward and backward take 2.4 times as long in the fused kernel (3 heads,
    batch 8, torch 2.14.1, one thread of an AMD EPYC with avx512_bf16); `make bench-training` shows what a step gains.

    Args:
        dtype: of the activations.
    """
    fused = use_fused_attn() and not (dtype == torch.bfloat16 and device.type == "cpu")
    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.fused_attn = fused


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups: weight decay for weights, none for biases, normalisation weights and the model's own exceptions."""
    inner = model.model if isinstance(model, Normalized) else model
    groups: list[dict[str, Any]] = param_groups_weight_decay(
        inner, weight_decay, no_weight_decay_list=exempt_from_decay(inner)
    )
    return groups


def exempt_from_decay(model: nn.Module) -> Collection[str]:
    """Names of the weights that a model itself exempts from weight decay, such as pos_embed; timm's models and our Segmenter name them."""
    names: Collection[str] = getattr(model, "no_weight_decay", set)()
    return names
