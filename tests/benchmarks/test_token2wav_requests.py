# SPDX-License-Identifier: Apache-2.0
"""The benchmark of several requests at once, on a DiT of a few thousand parameters. Nothing here asserts a time."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_audio_perf.benchmarks import harness, token2wav, token2wav_requests
from vllm_omni_audio_perf.benchmarks.harness import Device
from vllm_omni_audio_perf.cli import main
from vllm_omni_audio_perf.token2wav import BlockDiT, Sampler
from vllm_omni_audio_perf.token2wav.layout import BlockLayout

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "emb_dim": 32,
    "look_backward_layers": [0, 2],
    "look_ahead_layers": [1, 2],
    "enc_dim": 32,
    "enc_channels": [32, 32, 32, 32, 96],
    "enc_attention_channels": 16,
    "enc_se_channels": 16,
    "enc_res2net_scale": 2,
}
LENGTHS = [50, 2, 150, 48, 50]


def build(names: Any = token2wav_requests.VARIANTS, implementation: str = "transformers", **settings: Any) -> Any:
    return token2wav_requests.build_variants(names, implementation, LENGTHS, dit_config=TINY, **settings)


def measured(**settings: Any) -> harness.Row:
    *_, (row,) = harness.measure(build(**settings), [sum(LENGTHS)], 1, Device(), length_name="mel_frames")
    return row


def outputs(variant: harness.Variant, frames: int = sum(LENGTHS)) -> list[torch.Tensor]:
    run = variant.prepare(frames)
    with torch.inference_mode():
        return list(run())  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["transformers", "vllm_omni"])
def test_packed_gives_each_request_what_it_gets_alone(implementation: str) -> None:
    if implementation == "vllm_omni":
        pytest.importorskip("vllm_omni")

    assert 0 <= measured(implementation=implementation)["rel_error"] <= 1e-6


def test_so_does_a_whole_solve() -> None:
    assert 0 <= measured(solve=True)["rel_error"] <= 1e-5


@pytest.mark.parametrize("solve", [False, True])
def test_the_error_is_that_of_the_worst_request(solve: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of five requests is broken where it lies beside others."""
    unpack = BlockLayout.unpack

    def broken(self: BlockLayout, packed: torch.Tensor) -> list[torch.Tensor]:
        first, *others = unpack(self, packed)
        return [first * 1.01 if others else first, *others]

    monkeypatch.setattr(BlockLayout, "unpack", broken)

    assert measured(solve=solve)["rel_error"] == pytest.approx(0.01, rel=1e-3)


def test_requests_that_see_each_other_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    init = BlockLayout.__init__

    def joined(self: BlockLayout, frames: Any, **settings: Any) -> None:
        init(self, frames, **settings)
        self.sequence[:] = 0
        self.groups = self._make_groups([(1, 0), (0, 1), (1, 1), (0, 0)], 10_000, torch.device("cpu"))

    monkeypatch.setattr(BlockLayout, "__init__", joined)

    assert measured()["rel_error"] > 1e-3


def test_solo_evaluates_each_request_by_itself_and_packed_all_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[int] = []
    velocity = BlockDiT.velocity

    def counting(self: BlockDiT, mel: torch.Tensor, *args: Any) -> torch.Tensor:
        evaluated.append(mel.shape[0])
        return velocity(self, mel, *args)

    monkeypatch.setattr(BlockDiT, "velocity", counting)
    blocks = {}
    for variant in build():
        evaluated.clear()
        assert [tuple(output.shape) for output in outputs(variant)] == [(length, 80) for length in LENGTHS]
        blocks[variant.name] = list(evaluated)

    assert blocks == {"solo": [3, 1, 7, 2, 3], "packed": [16]}


def test_a_solve_is_the_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[int] = []
    sample = Sampler.sample

    def counting(self: Sampler, clips: Any) -> list[torch.Tensor]:
        solved.append(len(clips))
        return sample(self, clips)

    monkeypatch.setattr(Sampler, "sample", counting)
    for variant in build(solve=True):
        assert [tuple(output.shape) for output in outputs(variant)] == [(1, 80, length) for length in LENGTHS]

    assert solved == [1, 1, 1, 1, 1, 5]


def test_requests_differ_also_where_their_lengths_do_not() -> None:
    (solo,) = build(["solo"])
    first, *_, last = outputs(solo)
    assert first.shape == last.shape
    assert not torch.allclose(first, last)


def test_the_warm_up_is_one_short_request() -> None:
    for variant in build():
        assert [tuple(output.shape) for output in outputs(variant, 48)] == [(48, 80)]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setattr(token2wav, "DIT_CONFIG", TINY)
    monkeypatch.setattr(token2wav, "stock_implementation", lambda: "transformers")
    monkeypatch.setattr(harness, "extra_memory", lambda build, name, length, *args: 2.0 if name == "solo" else 3.0)
    solved: list[int] = []
    sample = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", lambda self, clips: solved.append(len(clips)) or sample(self, clips))
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):  # the command sets them, unless they are
        monkeypatch.setenv(name, "")

    options = "--requests 50,2,100 --solve --pairs 1"
    assert main(["bench", "token2wav_requests", *options.split(), "--json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert result["benchmark"] == "token2wav_requests"
    assert result["command"] == f"vllm-omni-audio-perf bench token2wav_requests {options}"
    assert (result["settings"]["requests"], result["settings"]["solve"]) == ([50, 2, 100], True)
    (row,) = result["rows"]
    assert (row["mel_frames"], row["extra_memory_ratio"]) == (152, 1.5)
    assert solved == [1, 1, 1, 3] * 2  # the warm-up and one round
    assert {"solo_seconds", "packed_seconds", "speedup", "rel_error"} <= set(row)
    assert "packed: speed-up over solo" in capsys.readouterr().out


def test_the_command_names_the_requests_also_if_they_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setattr(token2wav, "quiet_vllm", lambda: None)
    monkeypatch.setattr(
        token2wav_requests,
        "build_variants",
        lambda names, *args, **settings: [harness.Variant(name, lambda frames: lambda: None) for name in names],
    )

    assert main(["bench", "token2wav_requests", "--no-memory", "--json", str(path)]) == 0

    command = json.loads(path.read_text())["command"]
    assert command == "vllm-omni-audio-perf bench token2wav_requests --requests 300,700,1300,1700 --no-memory"


def test_lengths_stay_in_the_order_given() -> None:
    assert token2wav_requests.requests("500,20,500") == [500, 20, 500]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("500", "'500' is not allowed; it takes the lengths of at least two requests"),
        ("500,501", "'501' is not allowed; a length is a positive even number of mel frames"),
        ("500,", "'' is not allowed; a length is"),
    ],
)
def test_requests_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        token2wav_requests.requests(text)
    assert str(error.value).startswith(message)
