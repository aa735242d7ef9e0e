# SPDX-License-Identifier: Apache-2.0
"""What the counters of a runner add up to."""

import pytest

from vllm_omni_audio_perf.graphs import Fallback, GraphStatistics


def test_padding_by_dimension_and_of_all_elements() -> None:
    statistics = GraphStatistics()
    assert statistics.padding_waste() == 0
    statistics.record_hit((1, 30), (1, 40))
    statistics.record_hit((1, 40), (1, 40))
    statistics.record_hit((3, 10), (4, 40))

    assert statistics.hits == 3
    assert statistics.padding_waste(0) == pytest.approx(1 - 5 / 6)
    assert statistics.padding_waste(1) == pytest.approx(1 - 80 / 120)
    assert statistics.padding_waste() == pytest.approx(1 - (30 + 40 + 30) / (40 + 40 + 160))
    assert statistics.padding_waste(1, where={0: 1}) == pytest.approx(1 - 70 / 80)
    assert statistics.padding_waste(where={0: 4}) == pytest.approx(1 - 30 / 160)
    assert statistics.padding_waste(where={0: 2}) == 0


def test_misses_are_counted_by_reason() -> None:
    statistics = GraphStatistics()
    assert statistics.record_miss(Fallback.NO_BUCKET)
    assert not statistics.record_miss(Fallback.NO_BUCKET)
    assert statistics.record_miss(Fallback.NESTED)
    assert statistics.misses == {Fallback.NO_BUCKET: 2, Fallback.NESTED: 1}
    assert statistics.calls == 3


def test_summary() -> None:
    statistics = GraphStatistics()
    assert statistics.summary() == "0 of 0 calls replayed a graph; 0 captures, 0 failed, in 0.0 s, graphs hold 0 MiB"
    statistics.record_hit((1, 30), (1, 40))
    statistics.record_hit((3, 20), (4, 20))
    statistics.record_miss(Fallback.NESTED)
    statistics.record_miss(Fallback.NO_BUCKET)
    statistics.record_miss(Fallback.NO_BUCKET)
    statistics.captures, statistics.failed_captures = 4, 1
    statistics.capture_seconds, statistics.pool_mib = 2.34, 120.2
    assert statistics.summary() == (
        "2 of 5 calls replayed a graph; the others: 2 no bucket large enough, 1 inside another capture; "
        "padding 25.0% of all elements, by dimension 20.0%, 16.7%; "
        "4 captures, 1 failed, in 2.3 s, graphs hold 120 MiB"
    )
