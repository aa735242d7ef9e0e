# SPDX-License-Identifier: Apache-2.0
"""The benchmark of MiMo-Audio's decoder, on a decoder of a few thousand parameters."""

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

from vllm_omni_audio_perf import cli
from vllm_omni_audio_perf.benchmarks import harness, mimo_audio

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


def arguments(*given: str) -> argparse.Namespace:
    """The command's arguments, with one decoder layer."""
    return cli._build_parser().parse_args(["bench", "mimo_audio", "--decoder-layers", "1", *given])


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
        assert row["stock_fixed_buckets"] == [{5: 6, 13: 16, 300: None}[row["codes"]]]
        assert not [field for field in row if "fp32" in field or "mib" in field]
        if row["codes"] < 256:  # padded to a bucket
            assert row["stock_fixed_rel_error"] > 1e-3
            assert row["stock_fixed_tail_rel_error"] > 1e-2
    assert result["settings"]["batch"] == [1, 3]
    assert "--codes 5,13,300" in result["command"]
    assert "--batch 1,3" in result["command"]
    table = capsys.readouterr().out
    for column in ("codes", "batch", "stock, s", "plugin: speed-up", "stock_fixed: error at the end"):
        assert column in table
    assert "eager" in table


def test_mixed_lengths_show_what_stock_does_to_a_batch(tmp_path: Path) -> None:
    (row,) = bench(tmp_path, "--codes", "40", "--batch", "4", "--mixed")["rows"]
    assert row["stock_rel_error"] > 1e-2
    assert row["plugin_rel_error"] <= 1e-5
    assert row["stock_fixed_buckets"] == [64, 24, 32]  # of 40, 36, 20 and 30 codes


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
    for name in ("stock", "plugin"):
        assert 1e-3 < row[f"{name}_fp32_rel_error"] < 0.1
        assert 1e-3 < row[f"{name}_fp32_tail_rel_error"] < 0.1
    assert row["stock_fixed_fp32_tail_rel_error"] > 0.1  # its padding, far above the rounding


def test_stock_alone_has_no_error_but_the_rounding_to_bfloat16(tmp_path: Path) -> None:
    (row,) = bench(tmp_path, "--codes", "9", "--batch", "1", "--dtype", "bfloat16")["rows"]
    assert row["stock_rel_error"] == row["stock_tail_rel_error"] == 0
    assert row["stock_fp32_rel_error"] > 1e-3


def test_only_what_is_measured_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mimo_audio, "_plugin", lambda *args: pytest.fail("built"))
    (row,) = bench(tmp_path, "--codes", "9", "--batch", "1", "--variants", "stock,stock_fixed")["rows"]
    assert not [field for field in row if field.startswith("plugin")]


def test_samples_are_of_each_request_and_on_the_cpu() -> None:
    args = arguments("--codes", "10", "--batch", "3", "--mixed")
    decoders = mimo_audio.build_decoders(args)
    requests = mimo_audio.make_requests(args, 10, 3)
    for decode in (decoders.alone, *decoders.variants.values()):
        with torch.inference_mode():
            waveforms = decode(requests)
        assert [len(waveform) for waveform in waveforms] == [request.shape[1] * 960 for request in requests]
        assert {(waveform.device.type, waveform.dtype) for waveform in waveforms} == {("cpu", torch.float32)}
    assert decoders.alone_fp32 is None  # it would be the same


def test_fixed_shapes_are_what_upstreams_wrapper_captures() -> None:
    """Its own eager twin of the captured function, which takes hidden states, gives the same samples."""
    args = arguments()
    decode: Any = mimo_audio.build_decoders(args).variants["stock_fixed"]
    assert [decode.bucket(codes) for codes in (1, 4, 5, 256, 257)] == [4, 4, 6, 256, None]
    for request in (mimo_audio.make_requests(args, codes, 1)[0] for codes in (4, 64)):
        with torch.inference_mode():
            hidden = decode._tokenizer.encoder.decode_vq(request)
            (expected,) = decode._wrapper._batch_decode_hidden_states([hidden], [request.shape[1]])
            (actual,) = decode([request])
        torch.testing.assert_close(actual, expected.reshape(-1))


def test_memory_is_of_one_variant_of_the_same_sizes_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int]] = []

    def extra_memory(build: Any, name: str, codes: int, device: Any, warm_up: int) -> float:
        pickled = pickle.dumps(build)
        with monkeypatch.context() as fresh:
            fresh.setattr(mimo_audio, "SIZES", None)  # the other process has not this one's
            (variant,) = pickle.loads(pickled)()
            assert variant.name == name
            variant.prepare(codes)()
        asked.append((name, pickle.loads(pickled).args[1], codes))
        if (name, codes) == ("stock", 9):
            raise ChildProcessError("its process ended with exit code 1")
        return 2.0 if name == "plugin" else 8.0

    monkeypatch.setattr(harness, "extra_memory", extra_memory)
    path = tmp_path / "result.json"
    command = ["bench", "mimo_audio", "--decoder-layers", "1", "--pairs", "1", "--memory", "--json", str(path)]
    assert cli.main([*command, "--codes", "5,9", "--batch", "1,2", "--variants", "stock,plugin"]) == 1
    assert asked == [(name, batch, codes) for batch in (1, 2) for codes in (5, 9) for name in ("stock", "plugin")]
    result = json.loads(path.read_text(encoding="utf-8"))
    assert "resident" in result["settings"]["memory"]
    assert "--memory" in result["command"]
    for row in result["rows"]:
        assert row["plugin_extra_mib"] == 2.0
        assert row.get("stock_extra_mib") == (8.0 if row["codes"] == 5 else None)
        assert row.get("extra_memory_ratio") == (0.25 if row["codes"] == 5 else None)


def test_ctrl_c_reports_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def errors_of(args: Any, decoders: Any, codes: int, batch: int) -> dict[str, Any]:
        if batch == 2:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(mimo_audio, "errors_of", errors_of)
    path = tmp_path / "result.json"
    command = ["bench", "mimo_audio", "--decoder-layers", "1", "--pairs", "1", "--json", str(path)]
    assert cli.main([*command, "--codes", "5", "--batch", "1,2", "--variants", "plugin"]) == 130
    assert [row["batch"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]] == [1]
    out, err = capsys.readouterr()
    assert "plugin, s" in out
    assert "batch 1: " in err  # the progress bar


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_on_cuda(tmp_path: Path) -> None:
    (row,) = bench(tmp_path, "--codes", "13", "--batch", "2", "--device", "cuda")["rows"]
    assert row["plugin_rel_error"] <= 1e-5
    assert row["stock_fixed_buckets"] == [16]
    assert row["stock_fixed_tail_rel_error"] > 1e-2


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
