# SPDX-License-Identifier: Apache-2.0
"""The harness of the benchmarks, on variants that cost nothing. Nothing here asserts how long something takes."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.benchmarks import harness
from vllm_omni_audio_perf.benchmarks.harness import Benchmark, Device, Row, Variant

CPU = Device()


def variant(name: str, output: Callable[[int], Tensor | None] = lambda length: None, **settings: Any) -> Variant:
    return Variant(name, lambda length: lambda: output(length), **settings)


def recording(name: str, calls: list[tuple[int, str]], **settings: Any) -> Variant:
    """A variant that adds (length, name) to `calls` whenever it runs."""
    return variant(name, lambda length: calls.append((length, name)), **settings)


def last(rounds: Any) -> list[Row]:
    *_, rows = rounds
    return rows


# Three rounds at two lengths; every ratio below is exact in binary.
SECONDS = {
    (10, "stock"): [4.0, 8.0, 16.0],
    (10, "plugin"): [2.0, 2.0, 2.0],
    (20, "stock"): [8.0, 32.0, 128.0],
    (20, "plugin"): [4.0, 4.0, 2.0],
}


# -------------------------------------------------------------------------------------------------------- measuring


def test_all_cells_are_interleaved_and_every_second_round_runs_backwards() -> None:
    calls: list[tuple[int, str]] = []
    variants = [recording("stock", calls), recording("plugin", calls)]

    rounds = harness.measure(variants, [20, 10, 20], 3, CPU)
    counts = [len(calls) for _ in rounds]

    forward = [(10, "stock"), (10, "plugin"), (20, "stock"), (20, "plugin")]
    assert calls == forward + forward + forward[::-1] + forward  # the first is the warm-up
    assert counts == [8, 12, 16]  # each round's rows come right after it


def test_inputs_are_made_once_and_before_anything_is_timed() -> None:
    events: list[str] = []

    def prepare(length: int) -> Callable[[], None]:
        events.append(f"prepare {length}")
        return lambda: events.append(f"run {length}")

    last(harness.measure([Variant("plugin", prepare)], [1, 2], 1, CPU))

    assert events == ["prepare 1", "prepare 2", "run 1", "run 2", "run 1", "run 2"]


def test_runs_are_without_gradients_and_what_is_between_the_rounds_is_not_affected() -> None:
    inside: list[bool] = []
    rounds = harness.measure(
        [variant("plugin", lambda length: inside.append(torch.is_inference_mode_enabled()))], [1], 2, CPU
    )

    assert [torch.is_inference_mode_enabled() for _ in rounds] == [False, False]
    assert inside == [True] * 3


def test_a_variant_is_left_out_at_lengths_over_its_limit() -> None:
    calls: list[tuple[int, str]] = []
    variants = [recording("stock", calls, up_to=20), recording("plugin", calls)]

    rows = last(harness.measure(variants, [10, 20, 40], 1, CPU, length_name="codes"))

    assert (20, "stock") in calls
    assert (40, "stock") not in calls
    assert [row["codes"] for row in rows] == [10, 20, 40]
    assert "stock_seconds" in rows[1]
    assert set(rows[2]) == {
        "codes",
        "pairs",
        *(f"plugin_seconds{end}" for end in ("", "_min", "_max")),
        *(f"plugin_seconds_vs_previous_length{end}" for end in ("", "_min", "_max")),
    }


def test_nothing_within_the_limits_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to measure: every length is over the limit of stock"):
        next(harness.measure([variant("stock", up_to=5)], [10], 1, CPU))


def test_an_error_is_the_difference_to_the_baselines_output() -> None:
    outputs = {"stock": [3.0, 4.0], "sparse": [3.0, 4.0], "plugin": [3.0, 4.5]}
    variants = [
        variant(name, lambda length, values=values: torch.tensor(values) * length) for name, values in outputs.items()
    ]

    first, second = last(harness.measure(variants, [1, 2], 1, CPU))

    assert (first["max_abs_diff"], second["max_abs_diff"]) == (0.5, 1.0)
    assert (first["rel_error"], second["rel_error"]) == (0.1, 0.1)
    assert (first["sparse_max_abs_diff"], first["sparse_rel_error"]) == (0.0, 0.0)


def test_an_error_is_of_the_length_it_stands_at() -> None:
    """Without a baseline at a length there is none, though there is one at another length."""
    stock = variant("stock", lambda length: torch.ones(length), up_to=1)

    first, second = last(harness.measure([stock, variant("plugin", torch.ones)], [1, 2], 1, CPU))

    assert first["max_abs_diff"] == 0
    assert "max_abs_diff" not in second


def test_variants_without_an_output_have_no_error() -> None:
    (row,) = last(harness.measure([variant("stock"), variant("plugin")], [1], 1, CPU))

    assert "speedup" in row
    assert not [field for field in row if "diff" in field or "error" in field]


def test_outputs_of_different_shapes_are_a_fault() -> None:
    variants = [variant("stock", torch.ones), variant("plugin", lambda length: torch.ones(1, length))]

    with pytest.raises(RuntimeError, match=r"\(1, 3\) against \(3,\)"):
        next(harness.measure(variants, [3], 1, CPU))


def test_figures_of_two_variants() -> None:
    errors = {(20, "plugin"): {"max_abs_diff": 0.25, "rel_error": 0.5}}

    assert harness.summarize(["stock", "plugin"], SECONDS, errors, length_name="mel_frames") == [
        {
            "mel_frames": 10,
            "pairs": 3,
            "stock_seconds": 8.0,
            "stock_seconds_min": 4.0,
            "stock_seconds_max": 16.0,
            "plugin_seconds": 2.0,
            "plugin_seconds_min": 2.0,
            "plugin_seconds_max": 2.0,
            "speedup": 4.0,
            "speedup_min": 2.0,
            "speedup_max": 8.0,
        },
        {
            "mel_frames": 20,
            "pairs": 3,
            "stock_seconds": 32.0,
            "stock_seconds_min": 8.0,
            "stock_seconds_max": 128.0,
            "plugin_seconds": 4.0,
            "plugin_seconds_min": 2.0,
            "plugin_seconds_max": 4.0,
            "speedup": 8.0,
            "speedup_min": 2.0,
            "speedup_max": 64.0,
            "max_abs_diff": 0.25,
            "rel_error": 0.5,
            "stock_seconds_vs_previous_length": 4.0,
            "stock_seconds_vs_previous_length_min": 2.0,
            "stock_seconds_vs_previous_length_max": 8.0,
            "plugin_seconds_vs_previous_length": 2.0,
            "plugin_seconds_vs_previous_length_min": 1.0,
            "plugin_seconds_vs_previous_length_max": 2.0,
        },
    ]


def test_a_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() -> None:
    seconds = {(1, "stock"): [1.0, 8.0, 3.0], (1, "plugin"): [1.0, 2.0, 3.0]}

    (row,) = harness.summarize(["stock", "plugin"], seconds, {})

    assert row["stock_seconds"] / row["plugin_seconds"] == 1.5
    assert row["speedup"] == 1.0


def test_of_three_variants_each_is_compared_with_the_first() -> None:
    names = ["stock", "sparse", "plugin"]
    seconds = {(1, "stock"): [8.0], (1, "sparse"): [4.0], (1, "plugin"): [2.0]}
    errors = {(1, name): {"max_abs_diff": value, "rel_error": value} for name, value in (("sparse", 1), ("plugin", 2))}

    (row,) = harness.summarize(names, seconds, errors)
    row |= {"stock_extra_mib": 16.0, "sparse_extra_mib": 8.0, "plugin_extra_mib": 2.0}
    harness.add_memory_ratios(row, names)

    assert (row["sparse_speedup"], row["plugin_speedup"], row["speedup"]) == (2.0, 4.0, 4.0)
    assert (row["sparse_rel_error"], row["plugin_rel_error"], row["rel_error"]) == (1, 2, 2)
    assert [row[f"{prefix}extra_memory_ratio"] for prefix in ("sparse_", "plugin_", "")] == [0.5, 0.125, 0.125]
    assert not [field for field in row if field.startswith("stock_s") and "speedup" in field]


def test_one_variant_is_compared_with_nothing() -> None:
    seconds = {cell: values for cell, values in SECONDS.items() if cell[1] == "plugin"}

    first, second = harness.summarize(["plugin"], seconds, {})

    assert set(first) == {"length", "pairs", "plugin_seconds", "plugin_seconds_min", "plugin_seconds_max"}
    assert second["plugin_seconds_vs_previous_length"] == 2.0


# ----------------------------------------------------------------------------------------------------------- device


def test_the_device_is_waited_for_before_and_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(
        harness, "time", SimpleNamespace(perf_counter=lambda: events.append("clock") or float(len(events)))
    )

    _, seconds = harness._timed(lambda: events.append("run"), Device("cuda"))

    assert events == ["wait", "clock", "run", "wait", "clock"]
    assert seconds == 3.0


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_set_and_reported_for_cuda(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    device = Device("cuda", tf32=tf32)
    try:
        for backend in backends:
            backend.allow_tf32 = not tf32
        device.apply()
        assert device.describe() == {
            "type": "cuda",
            "name": "A GPU",
            "threads": torch.get_num_threads(),
            "tf32_matmul": tf32,
            "tf32_cudnn": tf32,
        }
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def test_threads_are_set_and_reported() -> None:
    before = torch.get_num_threads()
    try:
        Device(threads=3).apply()
        assert Device().describe()["threads"] == 3
        Device().apply()  # none asked for: as it was
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_a_device_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch finds no CUDA device; allowed here: cpu"):
        Device("cuda").apply()
    with pytest.raises(ValueError, match="--tf32 needs --device cuda"):
        Device(tf32=True).apply()


# ----------------------------------------------------------------------------------------------------------- memory

MODULE = """
import os, signal
import torch
from vllm_omni_audio_perf.benchmarks.harness import Variant


def build(pid_file=None):
    if pid_file is not None:
        pid_file.write_text(str(os.getpid()))

    def fail(length):
        raise RuntimeError("out of luck")

    return [
        Variant("mebibytes", lambda length: lambda: torch.ones(length * 2**18)),
        Variant("failing", lambda length: lambda: fail(length)),
        Variant("killed", lambda length: lambda: os.kill(os.getpid(), signal.SIGKILL)),
    ]
"""


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that the processes can import, too, with variants of known memory."""
    (tmp_path / "memory_variants.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("memory_variants")
    del sys.modules["memory_variants"]


def test_memory_is_the_peak_of_one_run_in_a_process_of_its_own(importable: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The warm-up needs more than what is measured and must not count.
    mebibytes = harness.extra_memory(partial(importable.build, pid_file), "mebibytes", 96, CPU, 200)

    assert mebibytes == pytest.approx(96, abs=8)  # the kernel's count is not exact
    assert int(pid_file.read_text()) != os.getpid()


@pytest.mark.parametrize(
    ("name", "message"), [("failing", "ended with exit code 1$"), ("killed", "exit code -9, killed; is there enough")]
)
def test_a_process_that_fails_is_an_error(name: str, message: str, importable: Any) -> None:
    with pytest.raises(ChildProcessError, match=message):
        harness.extra_memory(importable.build, name, 1, CPU, 1)


def test_memory_is_added_to_the_rows_and_one_that_failed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"codes": 5, "batch": batch, "stock_seconds": 1.0, "plugin_seconds": 1.0} for batch in (1, 2)]
    del rows[1]["stock_seconds"]  # was not timed

    def extra_memory(build: Any, name: str, length: int, device: Device, warm_up_length: int) -> float:
        assert (length, warm_up_length) == (5, 3)
        if build == (2, "plugin"):
            raise ChildProcessError("killed")
        return {"stock": 8.0, "plugin": 2.0}[name]

    monkeypatch.setattr(harness, "extra_memory", extra_memory)
    found = harness.add_memory(
        rows, NAMES, lambda row, name: (row["batch"], name), CPU, 3, length_name="codes", fields=["batch"]
    )

    assert list(found) == [True, True, False]
    assert (rows[0]["stock_extra_mib"], rows[0]["plugin_extra_mib"], rows[0]["extra_memory_ratio"]) == (8.0, 2.0, 0.25)
    assert set(rows[1]) == {"codes", "batch", "plugin_seconds"}
    assert "memory of plugin at 5 codes, batch 2: killed" in capsys.readouterr().err


def test_memory_on_cuda_is_what_torch_allocated_less_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"now": 5, "peak": 99}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=held["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])

    assert harness._cuda_peak(lambda: held.update(peak=held["now"] + 12), Device("cuda")) == 12


# -------------------------------------------------------------------------------------------------------- reporting

NAMES = ["stock", "plugin"]
ROWS: list[Row] = [
    {
        **row,
        "stock_extra_mib": 920.4,
        "plugin_extra_mib": 224.2,
        "extra_memory_ratio": 0.2436,
        "max_abs_diff": 3.21e-6,
        "rel_error": 4.4e-7,
    }
    for row in harness.summarize(NAMES, SECONDS, {}, length_name="mel_frames")
]


def cells(table: str) -> dict[str, list[str]]:
    """The lines of a table by their first cell."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines}


def test_table_has_a_column_a_length_and_a_line_a_figure() -> None:
    assert cells(harness.table(ROWS, NAMES, "mel_frames")) == {
        "mel frames": ["10", "20"],
        "rounds": ["3", "3"],
        "stock: seconds": ["8 (4 to 16)", "32 (8 to 128)"],
        "plugin: seconds": ["2 (2 to 2)", "4 (2 to 4)"],
        "stock: times the previous length's": ["-", "4.00x (2.00x to 8.00x)"],
        "plugin: times the previous length's": ["-", "2.00x (1.00x to 2.00x)"],
        "stock: extra MiB": ["920", "920"],
        "plugin: extra MiB": ["224", "224"],
        "plugin: speed-up over stock": ["4.00x (2.00x to 8.00x)", "8.00x (2.00x to 64.00x)"],
        "plugin: extra memory to stock's": ["0.24x", "0.24x"],
        "plugin: max difference to stock": ["3.2e-06", "3.2e-06"],
        "plugin: relative error to stock": ["4.4e-07", "4.4e-07"],
    }


def test_table_of_three_variants_has_each_speed_up_once() -> None:
    seconds = {(1, "stock"): [8.0], (1, "sparse"): [4.0], (1, "plugin"): [2.0]}
    names = ["stock", "sparse", "plugin"]

    titles = list(cells(harness.table(harness.summarize(names, seconds, {}), names, "length")))

    assert [title for title in titles if "speed-up" in title] == [
        "sparse: speed-up over stock",
        "plugin: speed-up over stock",
    ]


def test_table_shows_what_is_missing() -> None:
    seconds = {cell: values for cell, values in SECONDS.items() if cell != (20, "stock")}
    table = cells(harness.table(harness.summarize(NAMES, seconds, {}), NAMES, "length"))

    assert table["stock: seconds"] == ["8 (4 to 16)", "-"]
    assert table["plugin: speed-up over stock"][1] == "-"
    assert "stock: extra MiB" not in table


def test_plot_is_a_png_also_with_figures_missing(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    incomplete = [{"mel_frames": 40, "pairs": 3, "plugin_seconds": 9.0, "plugin_extra_mib": 0.0}]
    for rows in (ROWS, [*ROWS, *incomplete], incomplete):
        path.unlink(missing_ok=True)
        harness.plot(rows, NAMES, "mel_frames", path, title="A title")
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_shows_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[Any, ...]] = []

    def errorbar(self: Axes, x: Any, y: Any, yerr: Any, label: str, **style: Any) -> None:
        drawn.append((label, x, y, yerr))

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    harness.plot(ROWS, NAMES, "mel_frames", tmp_path / "plot.png")

    assert drawn == [
        ("stock", [10, 20], [8.0, 32.0], [[4.0, 24.0], [8.0, 96.0]]),
        ("plugin", [10, 20], [2.0, 4.0], [[0.0, 2.0], [0.0, 0.0]]),
        ("stock", [10, 20], [920.4, 920.4], [[0.0, 0.0], [0.0, 0.0]]),
        ("plugin", [10, 20], [224.2, 224.2], [[0.0, 0.0], [0.0, 0.0]]),
    ]


def test_the_version_of_what_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "vllm-omni":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)

    versions = harness.versions()
    assert set(versions) == {"python", "torch", "transformers", "vllm", "vllm_omni", "plugin"}
    assert versions["vllm_omni"] is None
    assert versions["torch"] == installed("torch")


# -------------------------------------------------------------------------------------------------------------- run


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Of a benchmark with lengths in codes."""
    parser = argparse.ArgumentParser(prog="vllm-omni-audio-perf bench fake")
    parser.add_argument("--codes", type=lambda text: [int(item) for item in text.split(",")], default=[1, 2])
    harness.add_options(parser, ["stock", "sparse", "plugin"], default=["stock", "plugin"])
    return parser


@pytest.fixture
def run_fake(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a benchmark of variants that return ones; memory is 10 MiB a length for stock and 1 for the others."""

    def memory(build: Any, name: str, length: int, device: Device, warm_up_length: int) -> float:
        assert warm_up_length == 7
        return (10.0 if name == "stock" else 1.0) * length

    monkeypatch.setattr(harness, "extra_memory", memory)

    def run(arguments: Sequence[str], outputs: dict[str, Callable[[int], Tensor]] | None = None) -> int:
        args = parser.parse_args([str(argument) for argument in arguments])
        benchmark = Benchmark(
            name="fake",
            title="A fake",
            build=lambda: [variant(name, (outputs or {}).get(name, torch.ones)) for name in args.variants],
            names=args.variants,
            lengths=args.codes,
            length_name="codes",
            warm_up_length=7,
        )
        return harness.run(benchmark, parser, args, codes=args.codes, dtype="float32")

    return run


def test_json_has_the_schema_of_all_benchmarks(
    run_fake: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"

    assert run_fake(["--codes", "3,4", "--pairs", 2, "--json", path, "--plot", tmp_path / "plot.png"]) == 0

    result = json.loads(path.read_text())
    assert set(result) == {"benchmark", "command", "date", "versions", "device", "settings", "rows"}
    assert result["benchmark"] == "fake"
    assert result["command"] == "vllm-omni-audio-perf bench fake --codes 3,4 --pairs 2"
    assert set(result["device"]) == {"type", "name", "threads"}
    assert result["settings"] == {
        "codes": [3, 4],
        "dtype": "float32",
        "variants": ["stock", "plugin"],
        "pairs": 2,
        "device": "cpu",
        "threads": None,
        "tf32": False,
        "seed": 0,
        "memory": harness.memory_method(CPU),
    }
    spread = {"stock_seconds", "plugin_seconds", "speedup"}
    vs_previous = {f"{name}_seconds_vs_previous_length" for name in NAMES}
    plain = {"codes", "pairs", "stock_extra_mib", "plugin_extra_mib", "extra_memory_ratio", "max_abs_diff", "rel_error"}
    ends = ("", "_min", "_max")
    first, second = result["rows"]
    assert set(first) == plain | {field + end for field in spread for end in ends}
    assert set(second) == plain | {field + end for field in spread | vs_previous for end in ends}
    assert (second["stock_extra_mib"], second["plugin_extra_mib"], second["extra_memory_ratio"]) == (40.0, 4.0, 0.1)
    assert (tmp_path / "plot.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert cells(out)["plugin: extra memory to stock's"] == ["0.10x", "0.10x"]
    assert str(tmp_path) not in path.read_text()


def test_command_measures_the_same_again(parser: argparse.ArgumentParser) -> None:
    settings = {"codes": [5, 6], "variants": ["stock", "sparse", "plugin"], "pairs": 9, "tf32": True, "threads": 2}

    command = harness.command_line(parser, {**settings, "seed": 0, "device": "cpu"}, "codes")

    assert command == (
        "vllm-omni-audio-perf bench fake --codes 5,6 --variants stock,sparse,plugin --pairs 9 --tf32 --threads 2"
    )
    args = parser.parse_args(shlex.split(command)[3:])
    assert {name: getattr(args, name) for name in settings} == settings


def test_command_names_the_lengths_also_if_they_are_the_default(parser: argparse.ArgumentParser) -> None:
    assert harness.command_line(parser, {"codes": [1, 2], "seed": 0}, "codes") == (
        "vllm-omni-audio-perf bench fake --codes 1,2"
    )


def test_ctrl_c_keeps_what_the_full_rounds_gave(
    run_fake: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    calls: list[int] = []

    def interrupted(length: int) -> Tensor:
        calls.append(length)
        if len(calls) == 6:  # of 2 lengths: warm-up, one round, and half of the second
            raise KeyboardInterrupt
        return torch.ones(length)

    assert run_fake(["--json", path, "--plot", tmp_path / "plot.png"], {"plugin": interrupted}) == 130

    rows = json.loads(path.read_text())["rows"]
    assert [row["pairs"] for row in rows] == [1, 1]
    assert "speedup" in rows[1]
    assert "stock_extra_mib" not in rows[0]  # the memory was still to come
    assert cells(capsys.readouterr().out)["rounds"] == ["1", "1"]
    assert (tmp_path / "plot.png").is_file()


def test_ctrl_c_while_memory_is_taken_keeps_the_times(
    run_fake: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"

    def memory(build: Any, name: str, length: int, *args: Any) -> float:
        if length == 2:
            raise KeyboardInterrupt
        return 8.0

    monkeypatch.setattr(harness, "extra_memory", memory)

    assert run_fake(["--json", path]) == 130

    first, second = json.loads(path.read_text())["rows"]
    assert first["extra_memory_ratio"] == 1.0
    assert "stock_extra_mib" not in second
    assert second["pairs"] == 7


def test_ctrl_c_before_a_full_round_leaves_nothing(run_fake: Callable[..., int], tmp_path: Path) -> None:
    def interrupted(length: int) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fake(["--json", tmp_path / "result.json"], {"plugin": interrupted})
    assert list(tmp_path.iterdir()) == []


def test_the_json_is_written_after_every_round(
    run_fake: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    seen: list[list[int]] = []

    def look(length: int) -> Tensor:
        if path.exists():
            seen.append([row["pairs"] for row in json.loads(path.read_text())["rows"]])
        return torch.ones(length)

    run_fake(["--codes", "1", "--pairs", "3", "--json", path], {"plugin": look})

    assert seen == [[1], [2]]


def test_memory_that_cannot_be_taken_is_missing_and_said(
    run_fake: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory(build: Any, name: str, length: int, *args: Any) -> float:
        if (length, name) == (2, "stock"):
            raise ChildProcessError("its process ended with exit code -9")
        return 8.0

    monkeypatch.setattr(harness, "extra_memory", memory)

    assert run_fake(["--json", tmp_path / "result.json"]) == 1

    out, err = capsys.readouterr()
    assert cells(out)["stock: extra MiB"] == ["8", "-"]
    assert cells(out)["plugin: extra MiB"] == ["8", "8"]
    assert "memory of stock at 2 codes: its process ended with exit code -9" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "missing/x.json"], "--json missing/x.json: there is no folder missing"),
        (["--plot", "missing/x.png"], "--plot missing/x.png: there is no folder missing"),
        (["--json", "."], "--json . is a folder"),
        (["--plot", "x.svg"], "--plot x.svg: it takes a file that ends in .png"),
        (["--tf32"], "--tf32 needs --device cuda"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_before_measuring(
    arguments: list[str],
    message: str,
    run_fake: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[int] = []

    with pytest.raises(ValueError, match=message):
        run_fake(arguments, {"stock": lambda length: calls.append(length) or torch.ones(length)})
    assert calls == []


def test_a_plot_without_matplotlib_is_refused_before_measuring(
    run_fake: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    calls: list[int] = []

    with pytest.raises(ValueError, match=r'matplotlib: pip install "vllm-omni-audio-perf\[bench\]"'):
        run_fake(["--plot", tmp_path / "x.png"], {"stock": lambda length: calls.append(length) or torch.ones(length)})
    assert calls == []


def test_variants_are_measured_in_the_order_of_the_benchmark(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_args(["--variants", "plugin,stock,plugin"]).variants == ["stock", "plugin"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "stock,plugn"], "--variants: 'plugn' is unknown; allowed: stock, sparse, plugin"),
        (["--variants", ""], "--variants: '' is unknown"),
        (["--pairs", "0"], "--pairs: '0' is not allowed; it takes a whole number from 1"),
        (["--pairs", "-3"], "--pairs"),
        (["--threads", "two"], "--threads: 'two' is not allowed"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
    ],
)
def test_a_mistake_in_an_option_is_named(
    arguments: list[str], message: str, parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
    assert message in capsys.readouterr().err
