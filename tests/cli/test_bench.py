# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench`, with models that cost nothing in place of the real ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_audio_perf.benchmarks import harness, token2wav
from vllm_omni_audio_perf.cli import bench, main


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the command builds its variants from; each is replaced by one that returns ones and needs 5 MiB."""
    import torch

    calls: list[dict[str, Any]] = []

    def build_variants(names: list[str], implementation: str, **settings: Any) -> list[harness.Variant]:
        calls.append({"names": names, "implementation": implementation, **settings})
        limit = settings["stock_up_to"]
        return [
            harness.Variant(name, lambda frames: lambda: torch.ones(frames), limit if name == "stock" else None)
            for name in names
        ]

    monkeypatch.setattr(token2wav, "build_variants", build_variants)
    monkeypatch.setattr(harness, "extra_memory", lambda *args: 5.0)
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):  # the command sets them, unless they are
        monkeypatch.setenv(name, "")
    return calls


def test_defaults(built: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"

    assert main(["bench", "token2wav", "--json", str(path)]) == 0

    result = json.loads(path.read_text())
    assert result["benchmark"] == "token2wav"
    assert result["command"] == "vllm-omni-audio-perf bench token2wav --mel-frames 500,1000,2000"
    assert [row["mel_frames"] for row in result["rows"]] == [500, 1000, 2000]
    assert {row["pairs"] for row in result["rows"]} == {7}
    assert result["settings"]["variants"] == ["stock", "block_sparse", "plugin"]
    assert result["settings"]["stock_implementation"] == built[0]["implementation"]
    assert result["device"]["type"] == "cpu"
    out, err = capsys.readouterr()
    assert "| mel frames " in out
    assert "plugin: speed-up over stock" in out
    assert "7/7" in err  # the progress bar


def test_every_option_reaches_the_measurement_and_the_command(built: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = "--mel-frames 4000,8000 --stock-up-to 4000 --variants stock,hoisted,plugin --pairs 1 --seed 3"

    # Underscores are dashes; the files are no part of the command.
    assert main(["bench", "token2wav", "--json", str(path), *options.replace("-up-to", "_up_to").split()]) == 0

    assert len(built) == 1
    assert built[0]["names"] == ["stock", "hoisted", "plugin"]
    assert (built[0]["seed"], built[0]["stock_up_to"], built[0]["device"]) == (3, 4000, "cpu")
    result = json.loads(path.read_text())
    assert result["command"] == f"vllm-omni-audio-perf bench token2wav {options}"
    shorter, longer = result["rows"]
    assert {"stock_seconds", "speedup", "plugin_speedup", "hoisted_speedup"} <= set(shorter)
    assert "stock_seconds" not in longer
    assert "speedup" not in longer
    assert "plugin_seconds" in longer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mel-frames", "500,501"], "'501' is not allowed; a length is a positive even number of mel frames"),
        (["--mel-frames", "0"], "'0' is not allowed; a length is a positive even number of mel frames"),
        (["--pairs", "0"], "'0' is not allowed; it takes a whole number from 1"),
        (["--variants", "dense"], "'dense' is unknown; allowed: stock, block_sparse, hoisted, plugin, "),
    ],
)
def test_a_value_that_is_not_allowed_is_named(
    arguments: list[str], message: str, built: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "token2wav", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert built == []


@pytest.mark.parametrize(
    "arguments", [["--plot", "missing/plot.png"], ["--json", "missing/result.json"], ["--tf32"], ["--plot", "x.pdf"]]
)
def test_what_cannot_work_is_one_line_before_anything_is_built(
    arguments: list[str],
    built: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["bench", "token2wav", *arguments]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"vllm-omni-audio-perf: error: {arguments[0]}")
    assert err.count("\n") == 1
    assert built == []


def test_mimo_audio_needs_vllm_omni(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):  # the command sets them, unless they are
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "vllm_omni", None)  # as if not installed

    assert main(["bench", "mimo_audio"]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert "bench mimo_audio needs vLLM-Omni" in err
    assert err.count("\n") == 1


def test_a_benchmark_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2
    assert "BENCHMARK" in capsys.readouterr().err


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert set(bench._BENCHMARKS) <= set(capsys.readouterr().out.split())
