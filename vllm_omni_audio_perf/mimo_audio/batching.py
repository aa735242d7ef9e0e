# SPDX-License-Identifier: Apache-2.0
"""Which shapes of a decode are captured, and how the requests of a step are put together into such shapes."""

from collections.abc import Callable, Sequence

from vllm_omni_audio_perf.mimo_audio.streaming import StreamSettings, windows

Shape = tuple[int, int, int]
"""Requests, codes of the longest one, rows of codes."""

DECODE_COST = 128
"""What one more decode costs beside its codes, counted in codes: launching some two thousand kernels and reading the
weights once. An estimate from the model's size, not measured on a GPU."""

MAX_BUCKETS = 64
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ONE_SHOT_GROUPS = 96
"""Longest clip decoded at once that has a bucket of its own: 15 s."""


def decode_buckets(
    settings: StreamSettings | None,
    *,
    max_requests: int,
    group_size: int,
    rows: Sequence[int],
    limit: int = MAX_BUCKETS,
) -> list[Shape]:
    """The shapes to capture.

    Args:
        settings: of the stream; None where whole clips are decoded at once.
        max_requests: of a step (``max_num_seqs``).
        group_size: codes of a group.
        rows: numbers of code rows that occur.
        limit: of their number. Every length for one request comes first, then the batches of the most common length.

    Returns:
        No shape twice. For one request every length up to the longest has a bucket that is at most about a quarter
        longer, and a stream's chunks have buckets of exactly their length.
    """
    if settings is None:
        lengths = _geometric(ONE_SHOT_GROUPS, 1.15)
        common, several = ONE_SHOT_GROUPS, _geometric(ONE_SHOT_GROUPS, 1.5)
    else:
        chunks, common = _chunk_lengths(settings)
        longest = max(chunks)
        lengths = sorted(chunks | {length for length in _geometric(longest, 1.25) if length < longest})
        several = sorted({common, settings.left_context or common, longest, *_geometric(longest, 2.0)})
    shapes = [(1, groups, row) for groups in lengths for row in rows]
    batches = [size for size in BATCH_SIZES if 1 < size <= max_requests]
    if max_requests > 1 and max_requests < BATCH_SIZES[-1] and max_requests not in batches:
        batches.append(max_requests)
    # The most common length first, then the longer ones: a shorter batch fits into them, but not the other way round.
    by_use = [common, *(groups for groups in reversed(several) if groups != common)]
    shapes += [(size, groups, row) for groups in by_use for size in batches for row in rows]
    return [(size, groups * group_size, row) for size, groups, row in dict.fromkeys(shapes)][:limit]


def plan_batches(lengths: Sequence[int], cost: Callable[[int, int], int]) -> list[list[int]]:
    """Put requests together into decodes, at the least cost.

    Args:
        lengths: codes of each request.
        cost: of a decode of so many requests, the longest of which has so many codes.

    Returns:
        The indices of each decode. Only requests of neighbouring lengths meet in one.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best: list[tuple[int, int]] = [(0, 0)]  # of the first n in order: cost, and where their last decode begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        best.append(min((best[start][0] + cost(end - start, longest) + DECODE_COST, start) for start in range(end)))
    batches, end = [], len(order)
    while end:
        start = best[end][1]
        batches.append(order[start:end])
        end = start
    return batches[::-1]


def _chunk_lengths(settings: StreamSettings) -> tuple[set[int], int]:
    """Groups of all windows of streams that have not ended, and of those in the middle of a long one."""
    # Long enough that the ramp is over and the left context full.
    groups = (
        settings.boundary_after(sum(settings.ramp) + settings.left_context + settings.chunk) + settings.right_context
    )
    stream = [window.groups for window in windows(settings, groups) if not window.final]
    # A stream that ends on a boundary decodes its left context once more.
    return {*stream, *([settings.left_context] if settings.left_context else [])}, stream[-1]


def _geometric(longest: int, ratio: float) -> list[int]:
    """Whole numbers from 1 to `longest`, each at most `ratio` times the one before, or one more."""
    sizes = [longest]
    while sizes[-1] > 1:
        sizes.append(min(sizes[-1] - 1, -int(-sizes[-1] // ratio)))
    return sizes[::-1]
