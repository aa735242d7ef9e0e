# SPDX-License-Identifier: Apache-2.0
"""Which of the talker's ids are codes."""

import pytest

from vllm_omni_audio_perf.qwen2_5_omni.codes import CodesError, clean_codes

CODEBOOK = 8194


def test_keeps_codes_in_order() -> None:
    assert clean_codes([5, 0, 8193, 5], CODEBOOK) == [5, 0, 8193, 5]
    assert clean_codes([], CODEBOOK) == []


@pytest.mark.parametrize("mark", [-1, 8292, 8293, 8294, 8295, 8296])
def test_drops_marks_and_placeholders(mark: int) -> None:
    assert clean_codes([mark, 1, mark, 2, mark], CODEBOOK) == [1, 2]
    assert clean_codes([mark], CODEBOOK) == []


@pytest.mark.parametrize("bad", [-2, 8194, 8291, 8297, 151643])
def test_an_id_of_no_codebook_is_named(bad: int) -> None:
    with pytest.raises(CodesError, match=rf"code {bad} at position 1 of 3 .* allowed: 0 to 8193"):
        clean_codes([3, bad, 4], CODEBOOK)


def test_leaves_what_upstreams_input_processor_sends() -> None:
    pytest.importorskip("vllm_omni")
    from vllm_omni.model_executor.stage_input_processors.qwen2_5_omni import _strip_codec_boundaries

    for ids in ([1, 2, 8294], [1, 2, -1, -1], [8292, 8292, 1, 8293], [8294], [-1], [8191, 0]):
        sent = _strip_codec_boundaries(ids)
        assert clean_codes(sent, CODEBOOK) == sent
