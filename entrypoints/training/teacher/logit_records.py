"""Converts a teacher's answers, on their device, to the content of a label bank's records and back."""

from __future__ import annotations

import math

import numpy as np
import torch

from training.runtime import accelerator
from training.teacher.feature_format import FeatureFormat
from training.teacher.feature_records import MIN_SCALE, pack_features, unpack_features
from training.teacher.record_format import Precision, RecordFormat

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A teacher's output: its logits, or its logits and features."""


class RecordLayout(RecordFormat):
    """Records of answers on a device. All rounding is done there, so that a first use equals every later one."""

    def pack(self, output: Output) -> torch.Tensor:
        """Logits (batch, classes) of any type, and features if kept -> the content of their records, uint8 (batch, width), on the
        same device."""
        if self.features is None:
            assert isinstance(output, torch.Tensor), "nobody asked for features"
            return self._pack_logits(output).view(torch.uint8)
        logits, features = output
        return torch.cat([self._pack_logits(logits).view(torch.uint8), pack_features(self.features, features)], dim=1)

    def _pack_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 numbers (batch, answer_bytes / 4). With `top_k`, the largest logits, their classes (float32 holds numbers below 2**24)
        and the residual; else all logits."""
        assert logits.shape[1] == self.classes
        kept, parts = logits.detach().float(), []
        if self.top_k is not None:
            logits = kept
            kept, classes = logits.topk(self.top_k, dim=1)
            parts = [classes.float(), logits.scatter(1, classes, -math.inf).logsumexp(1, keepdim=True)]
        if self.steps is None:
            return torch.cat([kept, *parts], dim=1)
        largest = kept.amax(1, keepdim=True)
        distance = largest - kept
        scale = _in_fp16(distance.amax(1, keepdim=True) / self.steps)
        codes = (distance / scale.clamp_min(MIN_SCALE)).round().clamp_max(self.steps)
        if parts:
            parts[1] = _in_fp16(parts[1] - largest)
        return torch.cat([codes, *parts, _in_fp16(largest), scale], dim=1)

    def rounded(self, content: torch.Tensor) -> Output:
        """What `decode` will return for what `pack` returned, on the same device."""
        logits = self._rounded_logits(content[:, : self.answer_bytes].contiguous().view(torch.float32))
        if self.features is None:
            return logits
        return logits, unpack_features(self.features, content[:, self.answer_bytes :])

    def _rounded_logits(self, packed: torch.Tensor) -> torch.Tensor:
        count = self.kept
        kept, residual = packed[:, :count], packed[:, 2 * count : 2 * count + 1]
        if self.steps is not None:
            largest = packed[:, -2:-1]
            kept, residual = largest - packed[:, -1:] * kept, largest + residual
        elif self.precision == "fp16":
            kept = _in_fp16(kept)
        if self.top_k is None:
            return kept
        return self._spread(kept, packed[:, count : 2 * count], residual - self._log_of_others)

    def decode(self, records: np.ndarray, device: torch.device) -> Output:
        """Records, uint8 (batch, size) -> logits float32 (batch, classes) on a device, and features if kept, float32 (batch, …)."""
        if self.features is None:
            return self._decode_logits(records, device)
        content = to_device(np.ascontiguousarray(records[:, self.feature_bytes]), device)
        return self._decode_logits(records, device), unpack_features(self.features, content)

    def _decode_logits(self, records: np.ndarray, device: torch.device) -> torch.Tensor:
        """The classes that were not kept share their probability evenly: each gets residual - log(their number). At temperature 1
        the softmax of the kept classes and the sum of the rest are the teacher's. At another temperature T an even tail has the
        most (T > 1) or least (T < 1) weight that its probability allows, so the kept classes get too little or too much: with
        75 % for the largest at T = 1, 8 % too little at T = 4 with 10 of 1,000 classes, 1 % with 500.
        """
        if self.top_k is None and self.steps is None:
            return to_device(np.ascontiguousarray(self.fields_of(records)["logits"]), device).float()
        found, count = self.logits_of(records), self.kept
        if found.classes is None or found.residual is None:
            return to_device(found.logits, device)
        packed = np.empty((len(records), 2 * count + 1), np.float32)  # one copy to the device
        packed[:, :count] = found.logits
        packed[:, count:-1] = found.classes
        packed[:, -1] = found.residual - np.float32(self._log_of_others)
        moved = to_device(packed, device)
        return self._spread(moved[:, :count], moved[:, count:-1], moved[:, -1:])

    @property
    def _log_of_others(self) -> float:
        """The logarithm of the number of classes that are not kept, rounded to float32."""
        return float(np.float32(math.log(self.classes - self.kept)))

    def _spread(self, kept: torch.Tensor, classes: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Logits (batch, top_k) at their classes, and the tail (batch, 1) at all others: (batch, classes)."""
        return tail.expand(-1, self.classes).contiguous().scatter_(1, classes.long(), kept)


def record_layout(
    classes: int, top_k: int | None, precision: Precision, features: FeatureFormat | None = None
) -> RecordLayout:
    """The layout that keeps the `top_k` largest logits; all if that is None or at least the number of classes."""
    return RecordLayout(classes, None if top_k is None or top_k >= classes else top_k, precision, features)


def _in_fp16(values: torch.Tensor) -> torch.Tensor:
    """float32, rounded to what fp16 holds."""
    return values.to(torch.float16).float()


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to a device; the host does not wait for a GPU copy."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if accelerator.is_gpu(device) else tensor.to(device)
