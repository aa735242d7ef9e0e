# SPDX-License-Identifier: Apache-2.0
"""The script for a GPU machine, tried on the CPU: tiny models, and a stand-in for CUDA graphs."""

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_audio_perf import cli
from vllm_omni_audio_perf.benchmarks import gpu
from vllm_omni_audio_perf.token2wav import BlockDiT

COMMAND = ["bench", "gpu", "--small", "--device", "cpu"]

TINY = {
    "frames": (24,),
    "many_up_to": 24,
    "stock_up_to": 24,
    "solve_frames": (24,),
    "parity_frames": (24, 50),
    "packed": (50, 24, 2),
    "codes": (3,),
    "batches": (1,),
    "vocoder_frames": 50,
    "piece_frames": 25,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SMALL", dataclasses.replace(gpu.SMALL, **TINY))


@dataclasses.dataclass
class Run:
    code: int
    out: str
    result: dict[str, Any]

    def rows(self, **fields: Any) -> list[dict[str, Any]]:
        return [row for row in self.result["rows"] if all(row.get(name) == value for name, value in fields.items())]


def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Run:
    path = tmp_path / "result.json"
    code = cli.main([*COMMAND, "--json", str(path), *arguments])
    return Run(code, capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8")))


def fake_cells(monkeypatch: pytest.MonkeyPatch, *cells: gpu.Cell) -> None:
    monkeypatch.setattr(gpu, "all_cells", lambda machine: list(cells))


def fake_cell(measure: Callable[[], dict[str, Any]], name: str = "thing", rank: int = 0, **row: Any) -> gpu.Cell:
    return gpu.Cell(
        {"part": name, "frames": 24, "requests": 1, "precision": "fp32", "mode": "eager", **row}, rank, measure
    )


# --------------------------------------------------------------------------------------------- the real measurements


def test_runs_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = bench(tmp_path, capsys)
    assert run.code == 0
    assert not [row for row in run.result["rows"] if "error" in row or "left_out" in row]

    checks = [row for row in run.result["rows"] if "limit" in row]
    assert all(row["ok"] and row["rel_error"] <= row["limit"] == 1e-5 for row in checks)
    compared = {(row["part"], row["case"]) for row in checks if "case" in row}
    assert compared == {
        *(("DiT evaluation", case) for case in ("eager to stock", "padded graph to eager")),
        *(("DiT evaluation", case) for case in ("together to alone", "groups to whole")),
        *(("MiMo decoder", case) for case in ("together to alone", "padded graph to eager")),
        ("vocoder", "pieces"),
    }
    for case, lengths in (("eager to stock", gpu.SMALL.parity_frames), ("groups to whole", [gpu.SMALL.grouped])):
        assert [row["frames"] for row in run.rows(case=case)] == [*lengths]
    assert {row["requests"] for row in run.rows(part="DiT evaluation", case="padded graph to eager")} == {1, 3, 8}
    assert run.rows(case="groups to whole")[0]["groups"] >= 3

    timed = [row for row in run.rows(part="DiT evaluation") if "case" not in row]
    assert {(row["frames"], row["requests"], row["precision"], row["mode"]) for row in timed} == {
        (frames, requests, precision, mode)
        for frames in gpu.SMALL.frames
        for requests in (1, 8)
        for precision in ("fp32", "bf16")
        for mode in ("stock", "eager", "graph")
        if mode != "stock" or (requests == 1 and precision == "fp32" and frames <= 50)
    }
    for row in timed:
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert ("speedup" in row) == (row["frames"] <= 50)
        if (row["precision"], row["mode"]) != ("fp32", "eager"):
            assert ("limit" in row) == (row["precision"] == "fp32")
            assert row["rel_error"] <= (1e-5 if row["precision"] == "fp32" else 3e-2)
        if row["precision"] == "bf16":
            assert row["rel_error"] > 1e-4

    solves = {(row["precision"], row["mode"]): row for row in run.rows(part="DiT solve")}
    assert set(solves) == {("fp32", "stock"), *((p, m) for p in ("fp32", "bf16") for m in ("eager", "graph"))}
    assert solves["fp32", "stock"]["rel_error"] <= 1e-5
    assert solves["fp32", "graph"]["rel_error"] <= 1e-5
    assert 1e-5 < solves["bf16", "eager"]["rel_error"] < 3e-2

    decodes = [row for row in run.rows(part="MiMo decoder") if "case" not in row]
    assert [(row["codes"], row["requests"], row["precision"], row["mode"]) for row in decodes] == [
        (codes, batch, "bf16", mode) for codes in (3, 12) for batch in (1, 4) for mode in ("eager", "graph")
    ]
    assert all(row["seconds"] > 0 for row in decodes)
    assert 1e-4 < run.rows(case="bf16 to fp32")[0]["rel_error"] < 0.2
    assert all(row["capture_seconds"] > 0 for row in run.result["rows"] if row["mode"] == "graph" and "seconds" in row)

    assert run.result["command"] == "vllm-omni-audio-perf bench gpu --device cpu --small"
    assert run.result["versions"]["torch"] == torch.__version__.partition("+")[0]
    above, _, table = run.out.partition("\n\n")
    assert "parity checks (err <= 1e-05): " in above
    assert " 0 failed, 0 not made" in above
    assert "TF32: left out" in above
    assert "graph: a stand-in" in above
    header, rule, *lines = table.splitlines()
    assert header.split()[1:-1:2][:4] == ["what", "size", "n", "type"]
    assert set(rule) <= set("|-")
    assert {line.count("|") for line in (header, rule, *lines)} == {header.count("|")}
    assert len(lines) == len({gpu._identity(row) for row in run.result["rows"]})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert ["DiT evaluation, together to alone", "2-100 f", "8", "fp32"] in [line[:4] for line in cells]
    (line,) = [line for line in cells if line[:4] == ["MiMo decoder", "12 c", "4", "bf16"]]
    eager, graph = (row["seconds"] for row in decodes[-2:])
    assert line[4:7] == ["", f"{eager * 1000:.4g}", f"{graph * 1000:.4g}"]


@pytest.mark.usefixtures("tiny")
def test_needs_neither_vllm_nor_vllm_omni(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    program = (
        "import dataclasses, sys; sys.modules['vllm'] = sys.modules['vllm_omni'] = None\n"
        "from vllm_omni_audio_perf import cli\n"
        "from vllm_omni_audio_perf.benchmarks import gpu\n"
        f"gpu.SMALL = dataclasses.replace(gpu.SMALL, **{TINY!r})\n"
        f"sys.exit(cli.main({[*COMMAND, '--json', str(path)]!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert rows
    assert not [row for row in rows if "error" in row or "left_out" in row]


@pytest.mark.usefixtures("tiny")
def test_a_wrong_evaluation_fails_the_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = BlockDiT.evaluate
    monkeypatch.setattr(BlockDiT, "evaluate", lambda self, *args: 1.01 * evaluate(self, *args))
    run = bench(tmp_path, capsys)
    assert run.code == 1
    for row in run.rows(case="eager to stock"):
        assert row["ok"] is False
        assert row["rel_error"] == pytest.approx(0.01, rel=1e-3)
    assert run.rows(case="together to alone", part="MiMo decoder")[0]["ok"] is True
    (line,) = [line for line in run.out.splitlines() if "eager to stock" in line and "| 24 f" in line]
    assert "eager: FAIL, 1.0e-02" in line
    assert "3 failed" in run.out  # two lengths, and the one that is timed


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("owner", "method", "cases"),
    [
        (
            "vllm_omni_audio_perf.token2wav.sampling.Sampler",
            "velocity_fixed",
            {("DiT evaluation", "padded graph to eager")},
        ),
        ("vllm_omni_audio_perf.token2wav.layout.BlockLayout", "unpack", {("DiT evaluation", "together to alone")}),
        (
            "vllm_omni_audio_perf.mimo_audio.decoder.FixedShapeDecoder",
            "decode_fixed",
            {("MiMo decoder", "padded graph to eager")},
        ),
    ],
)
def test_each_check_sees_its_error(
    owner: str,
    method: str,
    cases: set[tuple[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is computed by graphs alone, or for several clips alone, is wrong by a hundredth."""
    right = getattr(__import__("pkgutil").resolve_name(owner.rpartition(".")[0]), owner.rpartition(".")[2])
    original = getattr(right, method)

    def wrong(self: Any, *args: Any) -> Any:
        out = original(self, *args)
        if method == "unpack":
            return [1.01 * clip for clip in out] if len(out) > 1 else out
        if method == "decode_fixed" and args[1].shape[0] == len(gpu.SMALL.mixed_codes):
            return out
        return (1.01 * out[0], *out[1:])

    monkeypatch.setattr(right, method, wrong)
    run = bench(tmp_path, capsys)
    assert run.code == 1
    bad = {(row["part"], row.get("case", "")) for row in run.result["rows"] if row.get("ok") is False}
    assert cases <= bad
    assert all(row["ok"] for row in run.rows(case="eager to stock"))


@pytest.mark.usefixtures("tiny")
def test_a_cell_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate more.")

    monkeypatch.setattr(gpu.Token2WavCells, "_solve", fail)
    run = bench(tmp_path, capsys)
    assert run.code == 0
    solves = run.rows(part="DiT solve")
    assert len(solves) == 5
    assert {row["error"] for row in solves} == {"OutOfMemoryError: CUDA out of memory."}
    assert not [row for row in run.result["rows"] if "error" in row and row["part"] != "DiT solve"]
    assert "eager: OutOfMemoryError: CUDA out of memory." in run.out


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_model_that_cannot_be_built_is_tried_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail(self: Any) -> Any:
        tries.append(1)
        raise ValueError("another transformers")

    monkeypatch.setattr(gpu.Token2WavCells, "_build", fail)
    run = bench(tmp_path, capsys)
    assert run.code == 1  # its parity checks could not be made
    assert len(tries) == 1
    for row in run.result["rows"]:
        expected = None if row["part"] == "MiMo decoder" else "another transformers"
        assert (expected is None and "error" not in row) or expected in row["error"]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("how", ["capture", "replay"])
def test_figures_without_a_graph_do_not_pass_for_figures_with_one(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_omni_audio_perf.testing import graph_backends

    class Failing(graph_backends.ReexecutingBackend):
        def __init__(self) -> None:
            super().__init__(**{f"failing_{how}s": range(1, 1000)})

    monkeypatch.setattr(graph_backends, "ReexecutingBackend", Failing)
    run = bench(tmp_path, capsys)
    assert run.code == 1
    reason = {"capture": "no graph was captured: ", "replay": "the graph was not replayed: "}[how]
    graphs = run.rows(mode="graph")
    assert graphs
    for row in graphs:
        assert reason in row["error"]
        assert "fails on request" in row["error"] or how == "replay"
        assert "seconds" not in row
    assert not [row for row in run.result["rows"] if "error" in row and row["mode"] != "graph"]


# ------------------------------------------------------------------------------------------------------ around them


def test_the_important_comes_first_and_what_the_time_does_not_suffice_for_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(name: str, seconds: float) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            measured.append(name)
            time.sleep(seconds)
            return {"seconds": seconds, "seconds_min": seconds, "seconds_max": seconds}

        return run

    fake_cells(
        monkeypatch,
        fake_cell(measure("last", 0), "last", rank=2, limit=1e-5),
        fake_cell(measure("second", 1.1), "second", rank=1),
        fake_cell(measure("first", 0.01), "first", rank=0),
    )
    run = bench(tmp_path, capsys, "--seconds", "1")
    assert measured == ["first", "second"]
    assert run.code == 0
    last, second, first = run.result["rows"]  # in the table's order
    assert last["left_out"] == "no time left"
    assert "seconds" not in last
    assert first["seconds"] == 0.01
    assert "left_out" not in second
    assert "eager: no time left" in run.out
    assert "1 left out; 1 parity checks (err <= 1e-05): 0 ok, 0 failed, 1 not made" in run.out


def test_the_json_is_written_after_each_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    seen: list[list[str]] = []

    def look() -> dict[str, Any]:
        if path.exists():
            seen.append([row.get("left_out", "") for row in json.loads(path.read_text(encoding="utf-8"))["rows"]])
        return {}

    def interrupt() -> dict[str, Any]:
        look()
        raise KeyboardInterrupt

    fake_cells(monkeypatch, fake_cell(look), fake_cell(look), fake_cell(interrupt), fake_cell(look))
    run = bench(tmp_path, capsys)
    assert run.code == 130
    assert seen == [["", "not measured", "not measured", "not measured"], ["", "", "not measured", "not measured"]]
    assert ["left_out" in row for row in run.result["rows"]] == [False, False, True, True]
    assert run.out.splitlines()[-1].startswith("| thing")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("error", [float("nan"), 1.1e-5, None])
def test_what_is_not_within_the_limit_fails(
    error: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN, too, and a check that raises."""

    def measure() -> dict[str, Any]:
        if error is None:
            raise RuntimeError("the shapes differ")
        return {"rel_error": error}

    fake_cells(monkeypatch, fake_cell(lambda: {"rel_error": 1e-5}, limit=1e-5), fake_cell(measure, "bad", limit=1e-5))
    run = bench(tmp_path, capsys)
    assert run.code == 1
    assert "1 ok, 1 failed, 0 not made" in run.out
    assert "eager: FAIL, " in run.out


def test_a_lost_device_is_not_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def lose() -> dict[str, Any]:
        measured.append(1)
        monkeypatch.setattr(gpu.Machine, "works", lambda self: False)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fake_cells(monkeypatch, fake_cell(lose, "one"), fake_cell(lose, "two", limit=1e-5))
    run = bench(tmp_path, capsys)
    assert run.code == 1
    assert measured == [1]
    assert "illegal memory access" in run.result["rows"][0]["error"]
    assert run.result["rows"][1]["error"].startswith("the device was lost before: ")


def test_an_error_that_the_device_survives_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("CUDA error: invalid configuration argument")

    fake_cells(monkeypatch, fake_cell(fail, "one"), fake_cell(lambda: {"rel_error": 0.0}, "two", limit=1e-5))
    run = bench(tmp_path, capsys)
    assert run.code == 0
    assert run.result["rows"][1]["ok"] is True


def test_speedups_are_over_stock_in_float32_for_as_many_requests() -> None:
    def row(mode: str, seconds: float, requests: int = 1, precision: str = "fp32", frames: int = 24) -> dict[str, Any]:
        return {
            "part": "DiT",
            "frames": frames,
            "requests": requests,
            "precision": precision,
            "mode": mode,
            "seconds": seconds,
        }

    rows = [
        row("stock", 4.0),
        row("eager", 2.0),
        row("graph", 1.0, 8),
        row("stock", 2.0, 1, "TF32"),
        row("eager", 1.0, 1, "bf16"),
    ]
    rows.append(row("eager", 1.0, frames=48))
    gpu._add_speedups(rows)
    assert [found.get("speedup") for found in rows] == [1.0, 2.0, 32.0, 2.0, 4.0, None]


def test_a_short_call_is_timed_several_at_once() -> None:
    machine = gpu.Machine("cpu", dataclasses.replace(gpu.SMALL, repeats=3, sample_seconds=0.05))
    calls = []
    row = machine.time(lambda: calls.append(time.sleep(0.01)))
    assert row["repeats"] == 3
    assert 0.01 <= row["seconds_min"] <= row["seconds"] < 0.05
    assert 2 + 3 * 2 <= len(calls) <= 2 + 3 * 5  # a warm-up, one to see, and the samples


def test_a_long_call_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LONG_SECONDS", 0.01)
    calls = []
    row = gpu.Machine("cpu", gpu.SMALL).time(lambda: calls.append(time.sleep(0.02)))
    assert row["repeats"] == len(calls) == 1
    assert row["seconds"] >= 0.02


def test_the_real_sizes() -> None:
    cells = gpu.all_cells(gpu.Machine("cpu", gpu.REAL))
    rows = [cell.row for cell in cells]
    assert {row["frames"] for row in rows if row["part"] == "DiT evaluation" and "case" not in row} == {
        *(240, 480, 1000, 2000, 4000, 8000)
    }
    assert max(row["frames"] for row in rows if row["mode"] == "stock") == 4000
    assert {(row["codes"], row["requests"]) for row in rows if row["part"] == "MiMo decoder" and "case" not in row} == {
        (codes, batch) for codes in (12, 120, 280) for batch in (1, 4, 8, 16)
    }
    assert {row["frames"] for row in rows if row["part"] == "DiT solve"} == {1000, 4000}
    assert [cell.rank for cell in cells if "case" in cell.row] == [0] * sum("case" in row for row in rows)
    assert any(frames % 24 for frames in gpu.REAL.parity_frames)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda_device_is_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert cli.main(["bench", "gpu", "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "bench gpu needs a CUDA device" in err
    assert "--device cpu --small" in err
    assert not path.exists()


@pytest.mark.parametrize("target", ["missing/result.json", "."])
def test_a_json_that_cannot_be_written_is_refused_first(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "all_cells", lambda machine: pytest.fail("measured"))
    assert cli.main([*COMMAND, "--json", target]) == 2
    assert f"--json {target}" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("tiny")
def test_on_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = bench(tmp_path, capsys, "--device", "cuda")
    assert run.code == 0
    assert not [row for row in run.result["rows"] if "error" in row or "left_out" in row]
    assert all(row["extra_mib"] > 0 for row in run.result["rows"] if "seconds" in row)
    assert {row["precision"] for row in run.result["rows"]} == {"fp32", "TF32", "bf16"}
