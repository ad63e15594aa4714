"""Converts a teacher's answers for pixels, on their device, to bytes of a label bank's records and back."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from training.teacher.feature_records import pack_features, unpack_features
from training.teacher.logit_records import Output, RecordLayout, to_device
from training.teacher.pixel_format import PixelFormat
from training.teacher.tensor_bits import bytes_of, fp16_of, pack_bits, unpack_bits

LEAST = 2.0**-24
"""The smallest positive fp16 number. If all logits are equal, the widest distance is 0, and their codes are 0."""


class PixelLayout(PixelFormat):
    """Records of answers for pixels on a device. All rounding is done there, as in RecordLayout."""

    def pack(self, output: Output) -> torch.Tensor:
        """Logits (batch, classes, rows, columns) of any type, and features if kept -> the content of their records, uint8
        (batch, width), on the same device."""
        if self.features is None:
            assert isinstance(output, torch.Tensor), "nobody asked for features"
            return self._pack_logits(output)
        logits, features = output
        return torch.cat([self._pack_logits(logits), pack_features(self.features, features)], dim=1)

    @property
    def packing_bytes(self) -> int:
        """Bytes per image that `pack` holds at once: float32 logits, their distances, those without the kept, and a log-sum-exp."""
        return 4 * 4 * self.classes * self.places

    def rounded(self, content: torch.Tensor) -> Output:
        """What `decode` will return for what `pack` returned, on the same device."""
        logits = self._unpack_logits(content[:, : self.answer_bytes])
        return (
            logits
            if self.features is None
            else (logits, unpack_features(self.features, content[:, self.answer_bytes :]))
        )

    def decode(self, records: np.ndarray, device: torch.device) -> Output:
        """Records, uint8 (batch, size) -> logits float32 (batch, classes, rows, columns) on a device, and features if kept."""
        return self.rounded(to_device(np.ascontiguousarray(records[:, : self.width]), device))

    def _pack_logits(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[1:] == (self.classes, self.rows, self.columns) and self.top_k < self.classes
        logits = logits.detach().float()
        largest = logits.amax(1, keepdim=True)
        coarse = F.avg_pool2d(logits - largest, 2, ceil_mode=True)
        parts = self._pack_distances((coarse.amax(1, keepdim=True) - coarse).flatten(1))
        if self.top_k:
            kept, classes = logits.topk(self.top_k, dim=1)
            others = logits.scatter(1, classes, -math.inf).logsumexp(1, keepdim=True) - math.log(
                self.classes - self.top_k
            )
            below = largest - torch.cat([kept[:, 1:], others], dim=1)
            parts += self._pack_distances(_by_place(below))
            parts.append(pack_bits(_by_place(classes).to(torch.uint8), self.class_bits))
        return torch.cat(parts, dim=1)

    def _pack_distances(self, distances: torch.Tensor) -> list[torch.Tensor]:
        """Distances float32 (batch, count) -> the bytes of the widest and of their codes."""
        widest = distances.amax(1, keepdim=True).half()
        shares = (distances / widest.float().clamp_min(LEAST)).clamp(0, 1)
        codes = (self.steps * shares.sqrt()).round().to(torch.uint8)
        return [bytes_of(widest), pack_bits(codes, self.code_bits)]

    def _unpack_distances(self, content: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, int]:
        """Output of `_pack_distances`, from a byte of the content on -> the distances, float32 (batch, count), and the next byte."""
        end = start + 2 + -(-count * self.code_bits // 8)
        shares = unpack_bits(content[:, start + 2 : end], count, self.code_bits).float() / self.steps
        return fp16_of(content[:, start : start + 2]) * (shares * shares), end

    def _unpack_logits(self, content: torch.Tensor) -> torch.Tensor:
        grid = (self.rows, self.columns)
        distances, end = self._unpack_distances(content, 0, self.classes * math.prod(self.coarse))
        coarse = -distances.reshape(-1, self.classes, *self.coarse)
        # by two, as it was averaged, then cropped: stretched to an odd grid, places would be misaligned
        doubled = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        logits = doubled[..., : self.rows, : self.columns]
        if not self.top_k:
            return logits
        distances, end = self._unpack_distances(content, end, self.places * self.top_k)
        classes = unpack_bits(content[:, end:], self.places * self.top_k, self.class_bits).long()
        below, classes = (part.reshape(-1, *grid, self.top_k).permute(0, 3, 1, 2) for part in (distances, classes))
        residual = math.log(self.classes - self.top_k) - below[:, -1:]
        others = logits.scatter(1, classes, -math.inf).logsumexp(1, keepdim=True)
        kept = torch.cat([torch.zeros_like(residual), -below[:, :-1]], dim=1)
        return (logits - others + residual).scatter(1, classes, kept)


def _by_place(values: torch.Tensor) -> torch.Tensor:
    """(batch, count, rows, columns) -> (batch, rows × columns × count)."""
    return values.permute(0, 2, 3, 1).flatten(1)


Layout = RecordLayout | PixelLayout
"""Layout of a label bank's records."""
