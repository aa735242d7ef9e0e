# SPDX-License-Identifier: Apache-2.0
"""The ids between talker and code2wav, against the functions of vLLM-Omni that write and read them."""

import pytest
import torch

from vllm_omni_audio_perf.mimo_audio.groups import (
    END_OF_SPEECH_MARK,
    SPEECH_MARK,
    CodesError,
    check_codes,
    from_ids,
    split_groups,
    to_ids,
)

GROUP_SIZE, ROWS = 4, 8
WIDTH = 36


def random_groups(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(1, 128, (ROWS, GROUP_SIZE), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_ids_give_the_codes_back(count: int) -> None:
    groups = random_groups(count)
    ids = to_ids(groups)
    assert ids.shape == (WIDTH * count,)
    codes = from_ids(ids, GROUP_SIZE, ROWS)
    assert codes.shape == (ROWS, GROUP_SIZE * count)
    if count:
        assert torch.equal(codes, torch.cat(groups, dim=1))


def test_ids_are_laid_out_as_upstream_lays_them_out() -> None:
    upstream = pytest.importorskip("vllm_omni.model_executor.stage_input_processors.mimo_audio")
    groups = random_groups(5)
    step_codes = torch.stack(groups)[:, None]  # [groups, 1, 8, 4]
    expected = upstream.prepend_and_flatten_colmajor(step_codes, torch.tensor([SPEECH_MARK] * GROUP_SIZE))
    assert torch.equal(to_ids(groups), expected)


def test_codes_are_read_as_upstream_reads_them() -> None:
    """Groups of text are skipped and the end of speech ends it."""
    code2wav = pytest.importorskip("vllm_omni.model_executor.models.mimo_audio.mimo_audio_code2wav")
    ids = to_ids(random_groups(6)).reshape(6, GROUP_SIZE, ROWS + 1)
    ids[1, :, 0] = 1234  # text
    ids[4, :, 0] = END_OF_SPEECH_MARK
    marks = code2wav.MiMoAudioCodes(0, 0, 0, END_OF_SPEECH_MARK, 0, 0, 0, SPEECH_MARK)
    expected = code2wav.extract_audio_code_tensor(ids.reshape(-1), GROUP_SIZE, ROWS, marks)
    codes = from_ids(ids.reshape(-1), GROUP_SIZE, ROWS)
    assert codes.shape == (ROWS, 3 * GROUP_SIZE)
    assert torch.equal(codes, expected)


def test_groups_of_zeros_are_text_steps() -> None:
    groups = random_groups(3)
    step_codes = torch.stack([groups[0], torch.zeros_like(groups[0]), groups[1], groups[2]])[:, None].to(torch.int32)
    assert [group.tolist() for group in split_groups(step_codes)] == [group.tolist() for group in groups]
    assert split_groups(torch.zeros(1, 1, ROWS, GROUP_SIZE)) == []


@pytest.mark.parametrize("length", [1, 35, 37, 71])
def test_a_wrong_number_of_ids_is_refused(length: int) -> None:
    with pytest.raises(CodesError, match=f"{length} ids are no whole number of groups; allowed: a multiple of 36"):
        from_ids(torch.full((length,), SPEECH_MARK), GROUP_SIZE, ROWS)


@pytest.mark.parametrize(("code", "row"), [(-1, 0), (1024, 0), (128, 7)])
def test_a_code_that_no_codebook_has_is_named(code: int, row: int) -> None:
    codes = torch.zeros(ROWS, 12, dtype=torch.long)
    check_codes(codes, [1024, 1024] + [128] * 6)
    codes[row, 5] = code
    with pytest.raises(CodesError, match=f"code {code} at position 5 of 12 is not in codebook {row}; allowed: 0 to"):
        check_codes(codes, [1024, 1024] + [128] * 6)


def test_more_rows_than_codebooks_are_refused() -> None:
    with pytest.raises(CodesError, match="9 rows; allowed: up to 8"):
        check_codes(torch.zeros(9, 4, dtype=torch.long), [128] * 8)
