# SPDX-License-Identifier: Apache-2.0
"""Which bucket a shape is padded to, and which sets of buckets are refused."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_audio_perf.graphs import Buckets

SIZES = st.integers(1, 6)


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [
        ((1, 10, 8), (1, 64, 8)),
        ((1, 64, 8), (1, 64, 8)),
        ((1, 65, 8), (1, 256, 8)),
        ((2, 64, 8), (2, 64, 8)),
        ((2, 65, 8), (8, 128, 8)),
        ((1, 10, 20), (1, 64, 20)),  # rows are never padded
        ((1, 65, 20), None),
        ((1, 10, 7), None),
        ((9, 1, 8), None),
        ((1, 257, 8), None),
    ],
)
def test_cheapest_that_is_large_enough(shape: tuple[int, ...], bucket: tuple[int, ...] | None) -> None:
    buckets = Buckets([(1, 256, 8), (1, 64, 8), (2, 64, 8), (8, 128, 8), (1, 64, 20)], exact_dims=(2,))
    assert buckets.choose(shape) == bucket


@given(st.sets(st.tuples(SIZES, SIZES, SIZES), min_size=1), st.tuples(SIZES, SIZES, SIZES), st.sets(st.integers(0, 2)))
def test_equals_search_of_all(shapes: set[tuple[int, ...]], shape: tuple[int, ...], exact: set[int]) -> None:
    fitting = [
        bucket
        for bucket in shapes
        if all(a <= b for a, b in zip(shape, bucket, strict=True)) and all(shape[dim] == bucket[dim] for dim in exact)
    ]
    chosen = Buckets(shapes, exact_dims=sorted(exact), maximum=1000).choose(shape)
    assert (chosen in fitting) if fitting else (chosen is None)
    assert chosen is None or math.prod(chosen) == min(map(math.prod, fitting))


def test_iterates_from_the_largest() -> None:
    buckets = Buckets([(1, 4), (3, 5), (2, 4), (1, 4)])
    assert list(buckets) == [(3, 5), (2, 4), (1, 4)]
    assert len(buckets) == 3


def test_none_at_all() -> None:
    assert Buckets([]).choose((1, 2)) is None


def test_number_is_bounded() -> None:
    shapes = list(itertools.product(range(1, 6), range(1, 14)))
    with pytest.raises(ValueError, match=r"65 buckets .* maximum of 64"):
        Buckets(shapes)
    assert len(Buckets(shapes[1:])) == 64
    with pytest.raises(ValueError, match=r"3 buckets .* maximum of 2"):
        Buckets([(1,), (2,), (3,)], maximum=2)


@pytest.mark.parametrize(
    ("shapes", "exact_dims", "message"),
    [
        ([(1, 0)], (), r"positive integers.*\(1, 0\)"),
        ([(1, -2)], (), r"\(1, -2\)"),
        ([(1, 2.0)], (), r"\(1, 2.0\)"),
        ([(True, 2)], (), r"\(True, 2\)"),
        ([()], (), r"\(\)"),
        ([(1, 2), (1, 2, 3)], (), r"one rank, got ranks \[2, 3\]"),
        ([(1, 2)], (2,), r"dimension 2 .* rank 2"),
        ([(1, 2)], (-1,), "dimension -1"),
    ],
)
def test_refuses(shapes: list[tuple[int, ...]], exact_dims: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Buckets(shapes, exact_dims=exact_dims)


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (1, -1)])
def test_refuses_empty_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
        Buckets([(4, 4)]).choose(shape)


def test_refuses_shape_of_another_rank() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 3\) is of rank 3, the buckets are of rank 2"):
        Buckets([(4, 4)]).choose((1, 2, 3))
