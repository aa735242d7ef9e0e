# SPDX-License-Identifier: Apache-2.0
"""The shapes for which graphs are captured, and which of them a call is padded to."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

Bucket = tuple[int, ...]
"""A shape that a graph is captured for, for example (batch, codes, code rows)."""

DEFAULT_MAXIMUM = 64


class Buckets:
    """A bounded set of buckets. Iterates over them from the largest product to the smallest.

    Args:
        shapes: the buckets, all of one rank, in any order; a repeated one counts once. May be empty.
        exact_dims: dimensions in which a shape is never padded.
        maximum: how many buckets there may be. Each is a graph with buffers of its own.

    Raises:
        ValueError: for more buckets than `maximum`, sizes that are not positive integers, several ranks, or an exact
            dimension that the buckets do not have.
    """

    def __init__(
        self, shapes: Iterable[Sequence[int]], *, exact_dims: Sequence[int] = (), maximum: int = DEFAULT_MAXIMUM
    ) -> None:
        buckets = {tuple(shape) for shape in shapes}
        if len(buckets) > maximum:
            raise ValueError(f"{len(buckets)} buckets are more than the maximum of {maximum}.")
        for bucket in buckets:
            if not bucket or any(type(size) is not int or size < 1 for size in bucket):
                raise ValueError(f"A bucket is a tuple of positive integers, got {bucket}.")
        ranks = sorted({len(bucket) for bucket in buckets})
        if len(ranks) > 1:
            raise ValueError(f"Buckets must be of one rank, got ranks {ranks}.")
        self._rank = ranks[0] if ranks else None
        self._exact_dims = frozenset(exact_dims)
        for dim in self._exact_dims:
            if dim < 0 or (self._rank is not None and dim >= self._rank):
                raise ValueError(f"Exact dimension {dim} is not a dimension of buckets of rank {self._rank}.")
        # Putting the requests of a step together asks thousands of times, and for few shapes.
        self._choose_cached = functools.lru_cache(maxsize=4096)(self._choose)
        self._largest_first = tuple(sorted(buckets, key=lambda bucket: (math.prod(bucket), bucket), reverse=True))

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._largest_first)

    def __len__(self) -> int:
        return len(self._largest_first)

    def choose(self, shape: Sequence[int]) -> Bucket | None:
        """The bucket to pad a shape to.

        Args:
            shape: what a call asks for, of the buckets' rank.

        Returns:
            The bucket of the smallest product among those at least as large in every dimension and equal in the exact
            ones; None where there is none.

        Raises:
            ValueError: for a size below 1, or another rank.
        """
        return self._choose_cached(tuple(shape))

    def _choose(self, shape: Bucket) -> Bucket | None:
        if any(size < 1 for size in shape):
            raise ValueError(f"Shape {shape} is empty: every size must be at least 1.")
        if self._rank is None:
            return None
        if len(shape) != self._rank:
            raise ValueError(f"Shape {shape} is of rank {len(shape)}, the buckets are of rank {self._rank}.")
        return next((bucket for bucket in reversed(self._largest_first) if self._holds(bucket, shape)), None)

    def _holds(self, bucket: Bucket, shape: Sequence[int]) -> bool:
        return all(
            size == given if dim in self._exact_dims else size <= given
            for dim, (size, given) in enumerate(zip(shape, bucket, strict=True))
        )
