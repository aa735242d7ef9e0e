# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the vocoder in pieces, on a small one. Nothing here asserts a time."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_audio_perf.benchmarks import harness, token2wav, vocoder
from vllm_omni_audio_perf.benchmarks.harness import Device
from vllm_omni_audio_perf.cli import main
from vllm_omni_audio_perf.options import Token2WavOptions
from vllm_omni_audio_perf.token2wav import Synthesizer
from vllm_omni_audio_perf.token2wav import vocoder as pieces

TINY = {"upsample_initial_channel": 64}
FRAMES = 140


def build(names: Any = vocoder.VARIANTS, implementation: str = "transformers", **settings: Any) -> Any:
    settings = {"piece_frames": 50, "bigvgan_config": TINY} | settings
    return vocoder.build_variants(names, implementation, **settings)


def measured(**settings: Any) -> harness.Row:
    *_, (row,) = harness.measure(build(**settings), [FRAMES], 1, Device())
    return row


@pytest.mark.parametrize("implementation", ["transformers", "vllm_omni"])
def test_pieces_give_the_same_waveform(implementation: str) -> None:
    if implementation == "vllm_omni":
        pytest.importorskip("vllm_omni")

    assert 0 <= measured(implementation=implementation)["rel_error"] <= 1e-5


def test_pieces_without_the_frames_around_them_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    vocode = pieces.vocode
    monkeypatch.setattr(pieces, "vocode", lambda *args, **settings: vocode(*args, **settings, overlap_frames=0))

    assert measured()["rel_error"] > 1e-3


def test_only_the_plugin_has_pieces_and_of_the_length_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    whole, plugin = build(piece_frames=60)
    model = token2wav.build_token2wav("transformers", "cpu", dit_config=vocoder.SMALL_DIT, bigvgan_config=TINY)
    forward = type(model.code2wav_bigvgan_model).forward
    monkeypatch.setattr(
        type(model.code2wav_bigvgan_model),
        "forward",
        lambda self, mel: frames.append(mel.shape[2]) or forward(self, mel),
    )

    with torch.inference_mode():
        samples = [variant.prepare(FRAMES)().shape for variant in (whole, plugin)]

    assert samples == [(FRAMES * 240,)] * 2
    assert frames == [FRAMES, 60 + 20, 20 + 60 + 20, 20 + 20]


def test_the_default_piece_is_that_of_the_stage_and_of_the_synthesizer() -> None:
    assert inspect.signature(Synthesizer).parameters["vocoder_frames"].default == Token2WavOptions().vocoder_frames


def test_the_seed_is_that_of_the_mel() -> None:
    def samples(seed: int) -> torch.Tensor:
        (variant,) = build(["stock"], seed=seed)
        with torch.inference_mode():
            return variant.prepare(4)()

    assert torch.equal(samples(0), samples(0))
    assert not torch.equal(samples(0), samples(1))


def test_only_stock_has_a_limit() -> None:
    limits = {variant.name: variant.up_to for variant in build(stock_up_to=100)}
    assert limits == {"stock": 100, "plugin": None}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setattr(vocoder, "BIGVGAN_CONFIG", TINY)
    monkeypatch.setattr(token2wav, "stock_implementation", lambda: "transformers")
    monkeypatch.setattr(harness, "extra_memory", lambda build, name, length, *args: 4.0 if name == "stock" else 1.0)
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):  # the command sets them, unless they are
        monkeypatch.setenv(name, "")

    options = "--mel-frames 20,40 --stock-up-to 20 --piece-frames 10 --pairs 1"
    assert main(["bench", "vocoder", *options.split(), "--json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert result["command"] == f"vllm-omni-audio-perf bench vocoder {options}"
    shorter, longer = result["rows"]
    assert shorter["extra_memory_ratio"] == 0.25
    assert {"speedup", "rel_error"} <= set(shorter)
    assert "stock_seconds" not in longer
    assert longer["plugin_extra_mib"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mel-frames", "31"], "--mel-frames: '31' is not allowed; a length is a positive even number"),
        (["--piece-frames", "0"], "--piece-frames: '0' is not allowed; it takes a whole number from 1"),
        (["--variants", "whole"], "--variants: 'whole' is unknown; allowed: stock, plugin"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "vocoder", *arguments])
    assert message in capsys.readouterr().err
