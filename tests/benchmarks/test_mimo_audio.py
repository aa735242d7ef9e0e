# SPDX-License-Identifier: Apache-2.0
"""The benchmark of MiMo-Audio's decoder, on a decoder of a few thousand parameters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

from vllm_omni_audio_perf import cli
from vllm_omni_audio_perf.benchmarks import mimo_audio

TINY = {
    "d_model": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "vocoder_dim": 32,
    "vocoder_intermediate_dim": 64,
    "vocoder_num_layers": 2,
    "vocoder_attention_heads": 2,
    "n_mels": 16,
    "num_quantizers": 8,
    "codebook_size": [64, 64, 16],
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mimo_audio, "SIZES", mimo_audio.SIZES | TINY)
    # The command sets these for its own process, which here goes on to other tests.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the command and read its JSON."""
    path = tmp_path / "result.json"
    command = ["bench", "mimo_audio", "--decoder-layers", "1", "--threads", "1", "--pairs", "2", "--json", str(path)]
    assert cli.main([*command, *arguments]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_row_for_each_length_and_batch(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    result = bench(tmp_path, "--codes", "13,5,300", "--batch", "1,3")
    assert [(row["batch"], row["codes"]) for row in result["rows"]] == [
        *((1, codes) for codes in (5, 13, 300)),
        *((3, codes) for codes in (5, 13, 300)),
    ]
    for row in result["rows"]:
        assert row["pairs"] == 2
        assert row["plugin_rel_error"] <= 1e-5
        assert row["plugin_tail_rel_error"] <= 1e-5
        assert row["stock_rel_error"] <= 1e-5  # of equal lengths
        assert row["speedup"] > 0
        if row["codes"] < 256:  # padded to a bucket
            assert row["stock_fixed_rel_error"] > 1e-3
            assert row["stock_fixed_tail_rel_error"] > 1e-2
    assert result["settings"]["batch"] == [1, 3]
    assert "--codes 5,13,300" in result["command"]
    assert "--batch 1,3" in result["command"]
    table = capsys.readouterr().out
    for column in ("codes", "batch", "stock, s", "plugin: speed-up", "stock_fixed: error at the end"):
        assert column in table


def test_mixed_lengths_show_what_stock_does_to_a_batch(tmp_path: Path) -> None:
    (row,) = bench(tmp_path, "--codes", "40", "--batch", "4", "--mixed")["rows"]
    assert row["stock_rel_error"] > 1e-2
    assert row["plugin_rel_error"] <= 1e-5


def test_lengths_of_a_mixed_batch() -> None:
    from argparse import Namespace

    args = Namespace(seed=0, mixed=True)
    lengths = [codes.shape[1] for codes in mimo_audio.make_requests(args, 100, 8)]
    assert lengths[0] == 100
    assert sorted(lengths)[0] == 10
    assert len(set(lengths)) == 8
    args.mixed = False
    assert {codes.shape for codes in mimo_audio.make_requests(args, 100, 8)} == {(8, 100)}


def test_bfloat16_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "result.png"
    (row,) = bench(tmp_path, "--codes", "9", "--batch", "2", "--dtype", "bfloat16", "--plot", str(plot))["rows"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert 0 < row["plugin_rel_error"] < 0.1


def test_the_error_would_show_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni_audio_perf.mimo_audio.batch_decoder import BatchDecoder

    decode = BatchDecoder.decode
    monkeypatch.setattr(BatchDecoder, "decode", lambda self, codes: [1.01 * one for one in decode(self, codes)])
    (row,) = bench(tmp_path, "--codes", "9", "--batch", "1")["rows"]
    assert row["plugin_rel_error"] == pytest.approx(0.01, rel=1e-3)
    assert torch.isfinite(torch.tensor(row["stock_seconds"]))


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "mimo_audio", "--codes", "0"])
    assert "'0' is not allowed" in capsys.readouterr().err
