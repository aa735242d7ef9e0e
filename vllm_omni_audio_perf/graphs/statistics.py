# SPDX-License-Identifier: Apache-2.0
"""What a runner did: calls replayed and not, how much of them was padding, and what its captures cost."""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_omni_audio_perf.graphs.buckets import Bucket

MIB = 2**20


class Fallback(StrEnum):
    """Why a call ran without a graph."""

    UNAVAILABLE = "no graphs on this device"
    SWITCHED_OFF = "switched off"
    NESTED = "inside another capture"
    NO_BUCKET = "no bucket large enough"
    NOT_CAPTURED = "bucket not captured"
    REPLAY_FAILED = "replay failed"


@dataclass
class _BucketUse:
    """The calls that were padded to one bucket."""

    hits: int = 0
    asked: list[int] = field(default_factory=list)
    """Sum over the calls, for each dimension."""
    asked_elements: int = 0


class GraphStatistics:
    """Counters of one runner. Those of calls may be updated by several threads."""

    def __init__(self) -> None:
        self.captures = 0
        self.failed_captures = 0
        self.capture_seconds = 0.0
        self.pool_mib = 0.0
        """What the graphs hold at present."""
        self.misses: Counter[Fallback] = Counter()
        self._uses: dict[Bucket, _BucketUse] = {}
        self._lock = threading.Lock()

    @property
    def hits(self) -> int:
        """Calls that replayed a graph."""
        return sum(use.hits for use in list(self._uses.values()))

    @property
    def calls(self) -> int:
        """All calls."""
        return self.hits + self.misses.total()

    def record_hit(self, shape: Sequence[int], bucket: Bucket) -> None:
        """Count a call that replayed the graph of a bucket."""
        with self._lock:
            use = self._uses.setdefault(bucket, _BucketUse(asked=[0] * len(bucket)))
            use.hits += 1
            use.asked = [total + size for total, size in zip(use.asked, shape, strict=True)]
            use.asked_elements += math.prod(shape)

    def record_miss(self, reason: Fallback) -> bool:
        """Count a call that ran without a graph.

        Returns:
            Whether it is the first for this reason.
        """
        with self._lock:
            self.misses[reason] += 1
            return self.misses[reason] == 1

    def padding_waste(self, dim: int | None = None, *, where: Mapping[int, int] | None = None) -> float:
        """The share of what was replayed that was padding.

        Args:
            dim: a dimension of the buckets, to compare sizes along it; None to compare products of all of them.
            where: sizes, by dimension, that a bucket must have to be counted. ``padding_waste(1, where={0: 1})`` is the
                waste along dimension 1 of the calls in buckets of size 1 along dimension 0.

        Returns:
            From 0, which it also is where nothing was replayed, to below 1.
        """
        asked = computed = 0
        for bucket, use in list(self._uses.items()):
            if all(bucket[fixed] == size for fixed, size in (where or {}).items()):
                asked += use.asked_elements if dim is None else use.asked[dim]
                computed += use.hits * (math.prod(bucket) if dim is None else bucket[dim])
        return 1 - asked / computed if computed else 0.0

    def summary(self) -> str:
        """One line for humans."""
        parts = [f"{self.hits} of {self.calls} calls replayed a graph"]
        if self.misses:
            parts.append("the others: " + ", ".join(f"{count} {reason}" for reason, count in self.misses.most_common()))
        if self.hits:
            rank = len(next(iter(self._uses)))
            by_dim = ", ".join(f"{self.padding_waste(dim):.1%}" for dim in range(rank))
            parts.append(f"padding {self.padding_waste():.1%} of all elements, by dimension {by_dim}")
        parts.append(
            f"{self.captures} captures, {self.failed_captures} failed, in {self.capture_seconds:.1f} s, "
            f"graphs hold {self.pool_mib:.0f} MiB"
        )
        return "; ".join(parts)
