# SPDX-License-Identifier: Apache-2.0
"""How much of the decodes of a deployment is padding, simulated for the shipped stage configs."""

import itertools
import random

import pytest
import yaml

from vllm_omni_audio_perf.graphs import Buckets
from vllm_omni_audio_perf.mimo_audio.batching import DECODE_COST, MAX_BUCKETS, Shape, decode_buckets, plan_batches
from vllm_omni_audio_perf.mimo_audio.streaming import StreamSettings, windows
from vllm_omni_audio_perf.stage_configs_index import stage_config_path

GROUP_SIZE, ROWS = 4, 8
GROUPS_OF_A_MINUTE = 375  # of 160 ms


def shipped_settings(name: str) -> StreamSettings:
    def connector(config: str) -> dict:
        text = yaml.safe_load(stage_config_path(config).read_text(encoding="utf-8"))
        return text["connectors"]["connector_of_shared_memory"]["extra"]

    extra = connector("mimo_audio")
    return StreamSettings.from_connector(extra | (connector(name) if name != "mimo_audio" else {}))


def buckets(settings: StreamSettings | None, max_requests: int) -> list[Shape]:
    return decode_buckets(settings, max_requests=max_requests, group_size=GROUP_SIZE, rows=[ROWS])


def decodes_of_a_step(lengths: list[int], captured: Buckets) -> list[tuple[list[int], Shape]]:
    """The decodes of a step: the lengths of each and its bucket."""

    def cost(size: int, longest: int) -> int:
        bucket = captured.choose((size, longest, ROWS))
        return bucket[0] * bucket[1] if bucket else size * longest

    plan = []
    for batch in plan_batches(lengths, cost):
        chosen = [lengths[index] for index in batch]
        bucket = captured.choose((len(chosen), max(chosen), ROWS))
        assert bucket is not None, "no bucket fits"
        plan.append((chosen, bucket))
    return plan


@pytest.mark.parametrize("name", ["mimo_audio", "mimo_audio_low_latency"])
@pytest.mark.parametrize("groups", [GROUPS_OF_A_MINUTE, 7, 30, 45, 70])
def test_every_chunk_of_a_stream_is_captured_with_little_padding(name: str, groups: int, record_property) -> None:
    captured = Buckets(buckets(shipped_settings(name), 1), exact_dims=(2,))
    asked = padded = 0
    for window in windows(shipped_settings(name), groups):
        ((chosen, bucket),) = decodes_of_a_step([window.groups * GROUP_SIZE], captured)
        asked += sum(chosen)
        padded += bucket[1]
        if not window.final:
            assert bucket[1] == window.groups * GROUP_SIZE
    record_property("padding in time", f"{1 - asked / padded:.1%}")
    print(f"{name}, {groups} groups: padding in time {1 - asked / padded:.1%}")
    assert 1 - asked / padded <= (0.05 if groups == GROUPS_OF_A_MINUTE else 0.15)


@pytest.mark.parametrize("name", ["mimo_audio", "mimo_audio_low_latency"])
def test_padding_of_one_to_eight_streams(name: str, record_property) -> None:
    """One to eight streams of 2 to 20 s that begin at any time, each step decoding all chunks that are ready.

    A step takes as long as the talker takes for three groups.
    """
    settings = shipped_settings(name)
    captured = Buckets(buckets(settings, 8), exact_dims=(2,))
    asked = padded = decodes = steps = 0
    random_numbers = random.Random(4)
    for streams in range(1, 9):
        for _ in range(20):
            ready: dict[int, list[int]] = {}
            for _ in range(streams):
                start, talked = random_numbers.randrange(60), 0
                for window in windows(settings, random_numbers.randrange(12, 126)):
                    talked = window.start + window.groups
                    ready.setdefault((start + talked) // 3, []).append(window.groups * GROUP_SIZE)
            for lengths in ready.values():
                # A stream's last window may be ready in the step of the one before, but goes into the next.
                for begin in range(0, len(lengths), 8):
                    steps += 1
                    for chosen, bucket in decodes_of_a_step(lengths[begin : begin + 8], captured):
                        asked += sum(chosen)
                        padded += bucket[0] * bucket[1]
                        decodes += 1
    record_property("padding, time x batch", f"{1 - asked / padded:.1%}")
    print(f"{name}: padding, time x batch {1 - asked / padded:.1%}; {decodes / steps:.2f} decodes a step")
    assert 1 - asked / padded <= 0.25


@pytest.mark.parametrize("max_requests", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("settings", [None, StreamSettings(), StreamSettings(chunk=3), StreamSettings(chunk=40)])
def test_the_number_of_buckets_is_bounded(settings: StreamSettings | None, max_requests: int) -> None:
    shapes = buckets(settings, max_requests)
    assert len(set(shapes)) == len(shapes) <= MAX_BUCKETS
    assert max(size for size, _, _ in shapes) <= max_requests
    longest = max(codes for _, codes, _ in shapes)
    captured = Buckets(shapes, exact_dims=(2,))
    for codes in range(GROUP_SIZE, longest + 1, GROUP_SIZE):
        bucket = captured.choose((1, codes, ROWS))
        assert bucket is not None
        assert bucket[1] <= max(codes * 1.3, codes + 2 * GROUP_SIZE)


def test_each_number_of_rows_has_buckets() -> None:
    shapes = decode_buckets(None, max_requests=1, group_size=GROUP_SIZE, rows=[8, 20])
    assert {rows for _, _, rows in shapes} == {8, 20}


def brute_force(lengths: list[int], cost) -> int:
    """The least cost over all ways to put requests together."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = None
    for size in range(len(rest) + 1):
        for others in itertools.combinations(range(len(rest)), size):
            batch = [first, *(rest[index] for index in others)]
            left = [length for index, length in enumerate(rest) if index not in others]
            total = cost(len(batch), max(batch)) + DECODE_COST + brute_force(left, cost)
            best = total if best is None else min(best, total)
    assert best is not None
    return best


@pytest.mark.parametrize("lengths", [[], [12], [280] * 5, [12, 280], [12, 16, 280, 276, 20], [4, 900, 400, 8, 1000, 4]])
def test_requests_are_put_together_at_the_least_cost(lengths: list[int]) -> None:
    def cost(size: int, longest: int) -> int:
        return size * longest

    batches = plan_batches(lengths, cost)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    total = sum(cost(len(batch), max(lengths[index] for index in batch)) + DECODE_COST for batch in batches)
    assert total == brute_force(lengths, cost)


def test_equal_requests_share_a_decode_and_unequal_ones_do_not() -> None:
    assert len(plan_batches([280] * 4, lambda size, longest: size * longest)) == 1
    assert plan_batches([12, 1000, 12], lambda size, longest: size * longest) == [[0, 2], [1]]
