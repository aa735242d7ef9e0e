# SPDX-License-Identifier: Apache-2.0
"""Whose ids of a step are whose."""

import pytest
import torch

from vllm_omni_audio_perf.scheduling.steps import (
    buffers_of_requests,
    ids_of_requests,
    is_cut,
    is_last_part,
    is_start_up_run,
    reason_of,
    start_up_information,
)


def test_ids_are_split_by_request() -> None:
    ids = torch.arange(9)
    assert ids_of_requests(ids, [2, 0, 3]) == [[0, 1], [], [2, 3, 4]]  # what is left only pads the step
    assert ids_of_requests(ids, None) == [list(range(9))]
    assert ids_of_requests(ids, [9]) == [list(range(9))]


def test_more_ids_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="have 10 codes, but there are 9"):
        ids_of_requests(torch.arange(9), [5, 5])


@pytest.mark.parametrize(
    ("information", "expected"),
    [
        (None, [{}, {}]),
        ([], [{}, {}]),
        ([{"a": 1}], [{"a": 1}, {}]),
        ([None, {"b": 2}], [{}, {"b": 2}]),
        ([{"a": 1}, {"b": 2}, {"c": 3}], [{"a": 1}, {"b": 2}]),
        ({"a": 1}, [{}, {}]),
    ],
)
def test_each_request_has_a_buffer(information: object, expected: list) -> None:
    assert buffers_of_requests(information, 2) == expected


def test_parts_of_a_cut_request() -> None:
    first = {"_omni_num_computed_tokens": 0, "_omni_prompt_len": 5}
    last = {"_omni_num_computed_tokens": 3, "_omni_prompt_len": 5}
    assert is_cut([1, 2, 3], first)
    assert not is_last_part(first)
    assert not is_cut([4, 5], last)
    assert is_last_part(last)
    assert not is_cut([1, 2, 3], {})
    assert not is_last_part({})


def test_the_start_up_run_is_recognised() -> None:
    assert is_start_up_run(start_up_information(2))
    assert not is_start_up_run([{"meta": {}}, None])
    assert not is_start_up_run(None)


def test_reasons_are_one_line() -> None:
    assert reason_of(ValueError("bad code\nsecond line")) == "bad code"
    assert reason_of(RuntimeError("no memory\nsecond line")) == "RuntimeError: no memory"
    assert reason_of(RuntimeError()) == "RuntimeError: "
