# SPDX-License-Identifier: Apache-2.0
"""The voices of a checkpoint."""

from pathlib import Path

import pytest
import torch

from vllm_omni_audio_perf.qwen2_5_omni.speakers import load_speakers, silent_speaker

CPU = torch.device("cpu")


class Payload:
    """What unpickling would execute."""

    def __reduce__(self) -> tuple:
        return (exec, ("raise SystemExit('executed')",))


def write(folder: Path, content: object) -> Path:
    torch.save(content, folder / "spk_dict.pt")
    return folder


def test_reads_voices_in_order_as_float32(tmp_path: Path) -> None:
    entry = {"cond": torch.ones(1, 192).half(), "ref_mel": torch.ones(1, 150, 80).double(), "bos_token": 151872}
    speakers = load_speakers(write(tmp_path, {"Chelsie": entry, "Ethan": entry}), CPU)
    assert list(speakers) == ["Chelsie", "Ethan"]
    assert speakers["Chelsie"].embedding.shape == (1, 192)
    assert speakers["Chelsie"].reference_mel.shape == (1, 150, 80)
    assert {tensor.dtype for tensor in speakers["Ethan"]} == {torch.float32}


def test_goes_to_the_device_of_the_stage(tmp_path: Path) -> None:
    entry = {"cond": torch.ones(1, 192), "ref_mel": torch.ones(1, 150, 80)}
    speakers = load_speakers(write(tmp_path, {"Chelsie": entry}), torch.device("meta"))
    assert {tensor.device.type for tensor in speakers["Chelsie"]} == {"meta"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"spk_dict\.pt is missing"):
        load_speakers(tmp_path, CPU)


@pytest.mark.parametrize(
    "content",
    [{"Chelsie": Payload()}, {"Chelsie": {"cond": torch.ones(1, 192)}}, {"Chelsie": 3}, [1, 2], {}],
    ids=["code", "no reference mel", "no dictionary of tensors", "no dictionary", "no voice"],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(ValueError, match=r"spk_dict\.pt (is not a dictionary of voices|holds no voice)"):
        load_speakers(write(tmp_path, content), CPU)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04 truncated"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spk_dict.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"spk_dict\.pt is not a dictionary of voices"):
        load_speakers(tmp_path, CPU)


def test_silent_speaker() -> None:
    speaker = silent_speaker(192, 80, CPU)
    assert speaker.embedding.shape == (1, 192)
    assert speaker.reference_mel.shape == (1, 300, 80)
    assert not speaker.embedding.any()
    assert not speaker.reference_mel.any()


def test_silent_speaker_is_float32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {tensor.dtype for tensor in silent_speaker(192, 80, CPU)} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)
