# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench gpu`: all that is to be known of a GPU, within minutes, in one table.

Needs torch and transformers, no vLLM and no vLLM-Omni: the Token2Wav is transformers' with random weights, MiMo-Audio's
decoder is built from its settings. Each *cell* is one measurement and becomes one *row*. The important ones run first;
what the time does not suffice for is left out, and says so. A cell that fails is a row with its error.

A row with a limit is a parity check: its error must not be larger. Times are of calls that follow each other without
waiting in between, as those of a solve do.
"""

import argparse
import copy
import gc
import json
import logging
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tqdm import tqdm

from vllm_omni_audio_perf.benchmarks import harness, mimo_audio

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_omni_audio_perf.graphs import GraphBackend, GraphRunner
    from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder
    from vllm_omni_audio_perf.token2wav import Clip, Sampler

Row = dict[str, Any]
T = TypeVar("T")

LIMIT = 1e-5
"""Largest relative error, in float32, between two ways to compute the same."""

FP32, TF32, BF16 = "fp32", "TF32", "bf16"
STOCK, EAGER, GRAPH = "stock", "eager", "graph"

REFERENCE_FRAMES = 300  # of the reference voice, 3 s
EVALUATION = 14  # which evaluation of a solve is measured: one in its middle
MANY = 8  # requests at once
LONG_SECONDS = 3.0  # a first call that takes longer is the only one; others repeat for about as long at most
MIB = 2**20

# Ranks: lower ones run first.
_PARITY, _ONE, _DECODER, _SOLVE, _MANY, _STOCK, _LAST = range(7)


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    token2wav: dict[str, Any] = field(default_factory=dict)
    """Settings of the Token2Wav; transformers' defaults are the sizes of Qwen2.5-Omni-7B."""

    decoder: dict[str, Any] = field(default_factory=lambda: mimo_audio.SIZES | {"decoder_layers": 32})
    """Settings of MiMo-Audio's tokenizer."""

    frames: Sequence[int] = (240, 480, 1000, 2000, 4000, 8000)
    many_up_to: int = 2000
    """The longest of `frames` at which many requests count as important."""

    stock_up_to: int = 4000
    """The longest of `frames` at which upstream's dense attention is measured."""

    solve_frames: Sequence[int] = (1000, 4000)
    parity_frames: Sequence[int] = (2, 22, 240, 250, 1000, 2002)
    """Few of them are whole blocks of 24."""

    packed: Sequence[int] = (1000, 500, 26, 240, 722, 48, 2, 330)
    """Mel frames of requests of mixed lengths."""

    grouped: int = 2002
    """Mel frames of the clip that is evaluated in groups."""

    small_group_mib: int = 16
    vocoder_frames: int = 3000
    piece_frames: int = 1000
    codes: Sequence[int] = (12, 120, 280)
    batches: Sequence[int] = (1, 4, 8, 16)
    mixed_codes: Sequence[int] = (120, 12, 1, 280, 57, 96)
    repeats: int = 5
    sample_seconds: float = 0.02
    """A time is that of so many calls as take about as long."""


REAL = Scale()
SMALL = Scale(
    token2wav={
        "dit_config": {
            "hidden_size": 64,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "head_dim": 16,
            "emb_dim": 32,
            "look_backward_layers": [0, 3],
            "look_ahead_layers": [1, 3],
            "enc_dim": 32,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_se_channels": 16,
        },
        "bigvgan_config": {"upsample_initial_channel": 64},
    },
    decoder=mimo_audio.SIZES
    | {
        "d_model": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "vocoder_dim": 32,
        "vocoder_intermediate_dim": 64,
        "vocoder_num_layers": 2,
        "vocoder_attention_heads": 2,
        "n_mels": 16,
        "num_quantizers": 8,
        "codebook_size": [64, 64, 16],
    },
    frames=(24, 50, 120),
    many_up_to=50,
    stock_up_to=50,
    solve_frames=(50,),
    parity_frames=(2, 22, 24, 50, 120),
    packed=(50, 24, 2, 26, 100, 48, 74, 12),
    grouped=722,
    small_group_mib=1,
    vocoder_frames=120,
    piece_frames=50,
    codes=(3, 12),
    batches=(1, 4),
    mixed_codes=(12, 3, 1, 40),
    repeats=2,
    sample_seconds=0.0,
)


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    row: Row
    """What tells its row from the others."""

    rank: int
    """Cells of lower ranks are measured first."""

    measure: Callable[[], Row]
    """The figures."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench gpu`."""
    parser = subparsers.add_parser(
        "gpu",
        help="everything on a GPU within minutes, with torch and transformers alone",
        description="Measure and check on a GPU, with torch and transformers alone, at the real sizes with random "
        "weights: one guided evaluation of Qwen2.5-Omni's DiT and whole solves, without and with CUDA graphs, in "
        "float32, TF32 and with bfloat16 linear layers; its vocoder whole and in pieces; the decoding of MiMo-Audio's "
        "codes in bfloat16; and that all ways give the same result. `stock` is transformers' class, whose evaluation "
        "encodes the voice each time, and which solves one request after the other. The table comes last. The exit "
        "code is 1 if a parity check fails.",
    )
    parser.add_argument(
        "--seconds",
        type=harness.positive,
        default=330,
        metavar="N",
        help="start no measurement later than this; the most important come first (default: 330)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures there, after each measurement"
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu is for trying the script, best with --small: without TF32, and with a stand-in for graphs that "
        "computes everything again (default: cuda)",
    )
    parser.add_argument("--small", action="store_true", help="tiny models and lengths, for trying the script")
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure and report.

    Returns:
        The exit code: 0; 1 if a parity check failed; 130 after Ctrl-C.

    Raises:
        ValueError: where there is no CUDA device, or the JSON could not be written.
    """
    start = time.perf_counter()
    _check(args)
    settings = {name: getattr(args, name) for name in ("seconds", "device", "small")}
    machine = Machine(args.device, SMALL if args.small else REAL)
    head = {
        "benchmark": "gpu",
        "command": harness.command_line(parser, settings, ""),
        "date": date.today().isoformat(),
        "versions": harness.versions(),
        "device": machine.describe(),
        "settings": settings,
        "notes": machine.notes,
    }
    cells = all_cells(machine)
    rows: list[Row] = []
    exit_code = 0
    try:
        for rows in measure(machine, cells, start + args.seconds):
            save(args.json, head, rows, start)
    except KeyboardInterrupt:
        exit_code = 130
    save(args.json, head, rows, start)
    for line in summary(head, rows, time.perf_counter() - start):
        print(line)
    print()
    print(table(rows))
    return exit_code or int(any(failed(row) for row in rows))


def _check(args: argparse.Namespace) -> None:
    import torch

    if args.json is not None and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.json is not None and args.json.is_dir():
        raise ValueError(f"--json {args.json} is a folder; it takes a file")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "bench gpu needs a CUDA device, and torch finds none; --device cpu --small tries the script without one"
        )


def save(path: Path | None, head: Row, rows: Sequence[Row], start: float) -> None:
    """Write the JSON, at once: a process that is killed meanwhile leaves the one before."""
    if path is not None:
        unfinished = path.with_name(f"{path.name}.unfinished")
        result = head | {"elapsed_seconds": time.perf_counter() - start, "rows": list(rows)}
        unfinished.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)


# -------------------------------------------------------------------------------------------------------- measuring


def all_cells(machine: "Machine") -> list[Cell]:
    """What is measured, in the order of the table."""
    token2wav, decoder = Token2WavCells(machine), DecoderCells(machine)
    return [*token2wav.parity(), *decoder.parity(), *token2wav.timings(), *decoder.timings()]


def measure(machine: "Machine", cells: Sequence[Cell], deadline: float) -> Iterator[list[Row]]:
    """Measure all cells, with a progress bar on stderr.

    Args:
        machine: where.
        cells: in the order of the rows.
        deadline: on the clock of `time.perf_counter`; no cell starts after it.

    Yields:
        After each cell the rows of all, of those not yet measured too.
    """
    rows = [dict(cell.row) for cell in cells]
    order = sorted(range(len(cells)), key=lambda index: cells[index].rank)
    for row in rows:
        row["left_out"] = "not measured"
    lost = ""
    with tqdm(order, desc="bench gpu", unit="cell") as bar:
        for index in bar:
            row = rows[index]
            bar.set_postfix_str(" ".join([*_identity(row), row["mode"]]))
            if time.perf_counter() >= deadline:
                row["left_out"] = "no time left"
                continue
            if lost:
                row["error"] = f"the device was lost before: {lost}"
            else:
                row |= _figures(cells[index], machine)
                lost = row["error"] if "error" in row and not machine.works() else ""
            del row["left_out"]
            if "limit" in row and "rel_error" in row:
                row["ok"] = row["rel_error"] <= row["limit"]
            _add_speedups(rows)
            yield rows
    yield rows


def _figures(cell: Cell, machine: "Machine") -> Row:
    import torch

    try:
        with torch.inference_mode(), machine.precision(cell.row.get("precision", FP32)):
            return cell.measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        figures = {"error": f"{type(error).__name__}: {lines[0]}"}
    machine.release()  # outside of the handler, whose error holds the frames that hold tensors
    return figures


def _add_speedups(rows: Sequence[Row]) -> None:
    """How much faster a row is than upstream's class in float32, which takes requests one after the other."""
    stock = {
        (row["part"], row["frames"]): row["seconds"]
        for row in rows
        if row["mode"] == STOCK and row["precision"] == FP32 and "seconds" in row
    }
    for row in rows:
        if "seconds" in row and (baseline := stock.get((row["part"], row.get("frames")))) is not None:
            row["speedup"] = baseline * row["requests"] / row["seconds"]


def failed(row: Row) -> bool:
    """Whether a parity check failed, or could not be made for another reason than time."""
    return "limit" in row and (not row.get("ok", True) or "error" in row)


class Once(Generic[T]):
    """Something that is built at first use. What could not be built is not tried again."""

    def __init__(self, build: Callable[[], T]) -> None:
        self._build = build
        self._built: list[T] = []
        self._failure = ""

    def __call__(self) -> T:
        """Return it.

        Raises:
            RuntimeError: if it cannot be built.
        """
        import torch

        if not self._built and not self._failure:
            try:
                with (
                    torch.inference_mode(False),
                    torch.no_grad(),
                ):  # parameters are no inference tensors elsewhere either
                    self._built.append(self._build())
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
        if self._failure:
            raise RuntimeError(self._failure)
        return self._built[0]


class Machine:
    """The device, how it computes, and how something is measured on it.

    Args:
        device: "cuda" or "cpu".
        scale: how large everything is.
    """

    def __init__(self, device: str, scale: Scale) -> None:
        self.device = device
        self.scale = scale
        self.precisions = (FP32, TF32, BF16) if device == "cuda" else (FP32, BF16)
        self.notes: list[str] = []
        if device != "cuda":
            self.notes = [
                "TF32: left out, only CUDA has it",
                "graph: a stand-in that computes everything again, not a graph; its times mean nothing",
                "MiB: left out, only CUDA counts it",
            ]
        self._precision = FP32
        self._apply()

    def describe(self) -> Row:
        """What the JSON says about it."""
        import torch

        found = harness.Device(self.device).describe()
        if self.device == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            found |= {
                "memory_mib": properties.total_memory // MIB,
                "capability": f"{properties.major}.{properties.minor}",
                "driver": _driver_version(),
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
        return found

    @cached_property
    def backend(self) -> "GraphBackend":
        """What captures graphs."""
        if self.device == "cuda":
            from vllm_omni_audio_perf.graphs import CudaGraphBackend

            return CudaGraphBackend()
        from vllm_omni_audio_perf.testing.graph_backends import ReexecutingBackend

        return ReexecutingBackend()

    @contextmanager
    def precision(self, name: str) -> Iterator[None]:
        """Compute float32 products and convolutions exactly inside, or with TF32. bfloat16 is up to the models."""
        before, self._precision = self._precision, name
        self._apply()
        try:
            yield
        finally:
            self._precision = before
            self._apply()

    def _apply(self) -> None:
        harness.Device(self.device, tf32=self._precision == TF32).apply()

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        harness.Device(self.device).synchronize()

    def release(self) -> None:
        """Give back the memory that nothing uses."""
        gc.collect()
        if self.works():
            harness.Device(self.device).release()

    def works(self) -> bool:
        """Whether the device still computes."""
        import torch

        try:
            return torch.ones(2, device=self.device).sum().item() == 2
        except Exception:
            return False

    def time(self, function: Callable[[], Any]) -> Row:
        """Seconds of a call, their spread, and the memory that it takes at its peak beside what is there."""
        first, extra = self._watched(function)
        samples = [first]
        if first <= LONG_SECONDS:
            once, extra = self._watched(function)
            calls = max(1, min(20, math.ceil(self.scale.sample_seconds / once)))
            samples = [once] if calls == 1 else []
            while len(samples) < self.scale.repeats and sum(samples) * calls < LONG_SECONDS:
                samples.append(self._timed(function, calls))
        row: Row = {
            "seconds": statistics.median(samples),
            "seconds_min": min(samples),
            "seconds_max": max(samples),
            "repeats": len(samples),
        }
        return row if extra is None else row | {"extra_mib": extra / MIB}

    def _watched(self, function: Callable[[], Any]) -> tuple[float, int | None]:
        if self.device != "cuda":
            return self._timed(function, 1), None
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = self._timed(function, 1)
        return seconds, torch.cuda.max_memory_allocated() - before

    def _timed(self, function: Callable[[], Any], calls: int) -> float:
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        self.synchronize()
        return (time.perf_counter() - start) / calls

    @contextmanager
    def graph(self, build: Callable[..., "GraphRunner"], bucket: tuple[int, ...]) -> Iterator["GraphRunner"]:
        """A runner with a graph for one bucket, which is freed after the block.

        Args:
            build: takes a backend and a budget, captures, and returns the runner.
            bucket: what it has to capture.

        Raises:
            RuntimeError: if there is no graph, or a call inside did not replay it. Figures without a graph must not
                pass for figures with one.
        """
        from vllm_omni_audio_perf.graphs import CaptureBudget

        with _graph_warnings() as warnings:
            runner = build(backend=self.backend, budget=CaptureBudget(seconds=60, mib=1024 * 1024))
            try:
                if bucket not in runner.captured:
                    raise RuntimeError(f"no graph was captured: {'; '.join(warnings) or 'no reason given'}")
                yield runner
                if runner.statistics.misses:
                    raise RuntimeError(f"the graph was not replayed: {runner.statistics.summary()}")
            finally:
                runner.release()

    def time_graph(self, runner: "GraphRunner", function: Callable[[], Any]) -> Row:
        """As `time`; the memory includes what the graph holds, which stands beside it."""
        row = self.time(function)
        if "extra_mib" in row:
            row["pool_mib"] = runner.statistics.pool_mib
            row["extra_mib"] += row["pool_mib"]
        return row | {"capture_seconds": runner.statistics.capture_seconds}


@contextmanager
def _graph_warnings() -> Iterator[list[str]]:
    """What our graphs warn of inside."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, collector = logging.getLogger("vllm_omni_audio_perf.graphs"), Collector(logging.WARNING)
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)


def _driver_version() -> str | None:
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(asked.stdout.split()), None)


def rel_error(actual: "Tensor", expected: "Tensor") -> float:
    """Relative error in the 2-norm.

    Raises:
        RuntimeError: for tensors of different shapes.
    """
    if actual.shape != expected.shape:
        raise RuntimeError(f"the shapes differ: {tuple(actual.shape)} against {tuple(expected.shape)}")
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


# -------------------------------------------------------------------------------------------------------- Token2Wav


class Evaluation:
    """One guided evaluation of several clips in the middle of a solve, from the same inputs each time.

    Args:
        sampler: whose evaluation.
        clips: evaluated together.
        group_mib: as in `Sampler.sample`.
    """

    def __init__(self, sampler: "Sampler", clips: "Sequence[Clip]", *, group_mib: int | None = None) -> None:
        import torch

        dit = sampler.dit
        self.sampler = sampler
        self.layout = dit.layout([clip.noise.shape[1] for clip in clips], guided=True, group_mib=group_mib)
        voices = [dit.voice(clip.speaker, clip.reference_mel) for clip in clips]
        self._conditions = dit.conditions(self.layout, voices, [clip.codes for clip in clips], guided=True)
        self._state = self.layout.pack([clip.noise[0] for clip in clips])
        blocks, device = self.layout.blocks, self._state.device
        constant, unconditional, rotation = self._conditions
        assert unconditional is not None
        self._fixed = (
            self._state,
            constant,
            unconditional,
            rotation[:blocks],
            self.layout.valid[:blocks].to(device),
            self.layout.clip,
            torch.full((1,), EVALUATION, dtype=torch.long, device=device),
        )

    def eager(self) -> "Tensor":
        """The velocity ``[blocks, block_size, mel_dim]``."""
        sampler = self.sampler
        modulation = sampler.table.at(EVALUATION)
        return sampler.dit.velocity(
            self._state, modulation, self._conditions, self.layout.groups, sampler.guidance_scale
        )

    def graph(self) -> "Tensor":
        """The same by the sampler's graphs."""
        assert self.sampler.graphs is not None
        (velocity,) = self.sampler.graphs((self.layout.blocks,), *self._fixed)
        return velocity

    def frames(self, velocity: "Tensor") -> "list[Tensor]":
        """``[frames, mel_dim]`` of each clip, without padding."""
        return self.layout.unpack(velocity)


class Token2WavCells:
    """Measurements of Qwen2.5-Omni's Token2Wav."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.scale = machine.scale
        self.token2wav: Once[Any] = Once(self._build)
        self.samplers = {precision: Once(partial(self._build_sampler, precision)) for precision in machine.precisions}
        self._expected: dict[tuple[int, int], Tensor] = {}
        self._mels: dict[int, Tensor] = {}
        self._waveforms: list[Tensor] = []

    def parity(self) -> list[Cell]:
        """The checks."""
        scale = self.scale
        evaluation = {"part": "DiT evaluation", "precision": FP32, "limit": LIMIT}
        cells = [
            Cell(
                evaluation | {"case": "eager to stock", "frames": frames, "requests": 1, "mode": EAGER},
                _PARITY,
                partial(self._eager_to_stock, frames),
            )
            for frames in scale.parity_frames
        ]
        packed = list(scale.packed)
        for clips in ([packed[0]], [max(scale.parity_frames)], packed[:3], packed):
            cells.append(
                Cell(
                    evaluation
                    | {"case": "padded graph to eager", "frames": clips, "requests": len(clips), "mode": GRAPH},
                    _PARITY,
                    partial(self._graph_to_eager, clips),
                )
            )
        cells.append(
            Cell(
                evaluation | {"case": "together to alone", "frames": packed, "requests": len(packed), "mode": EAGER},
                _PARITY,
                self._packed_to_alone,
            )
        )
        cells.append(
            Cell(
                evaluation | {"case": "groups to whole", "frames": scale.grouped, "requests": 1, "mode": EAGER},
                _PARITY,
                self._groups_to_whole,
            )
        )
        return cells

    def timings(self) -> list[Cell]:
        """The measurements of time and memory."""
        scale, precisions = self.scale, self.machine.precisions
        cells = []
        for requests in (1, MANY):
            for frames in scale.frames:
                for precision in precisions:
                    for mode in (STOCK, EAGER, GRAPH):
                        if mode == STOCK and (requests > 1 or frames > scale.stock_up_to or precision == BF16):
                            continue
                        rank = _ONE
                        if requests > 1:
                            rank = _MANY if frames <= scale.many_up_to else _LAST
                        elif (mode, precision) == (STOCK, TF32):
                            rank = _LAST
                        row: Row = {
                            "part": "DiT evaluation",
                            "frames": frames,
                            "requests": requests,
                            "precision": precision,
                            "mode": mode,
                        }
                        if precision == FP32 and mode != EAGER:
                            row["limit"] = LIMIT
                        cells.append(Cell(row, rank, partial(self._evaluation, frames, requests, precision, mode)))
        for frames in scale.solve_frames:
            for precision in precisions:
                for mode in (STOCK, EAGER, GRAPH):
                    if mode == STOCK and precision != FP32:
                        continue
                    rank = _SOLVE
                    if mode == STOCK:
                        rank = _STOCK if frames == min(scale.solve_frames) else _LAST
                    row = {
                        "part": "DiT solve",
                        "frames": frames,
                        "requests": 1,
                        "precision": precision,
                        "mode": mode,
                    }
                    cells.append(Cell(row, rank, partial(self._solve, frames, precision, mode)))
        for precision in (FP32, TF32):
            for case, piece in (("whole", scale.vocoder_frames), ("pieces", scale.piece_frames)):
                if precision in precisions:
                    row = {
                        "part": "vocoder",
                        "frames": scale.vocoder_frames,
                        "requests": 1,
                        "precision": precision,
                        "case": case,
                        "mode": EAGER,
                    }
                    if (precision, case) == (FP32, "pieces"):
                        row["limit"] = LIMIT
                    cells.append(Cell(row, _PARITY if precision == FP32 else _STOCK, partial(self._vocode, piece)))
        return cells

    # ----------------------------------------------------------------------------------------------------- building

    def _build(self) -> Any:
        from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

        from vllm_omni_audio_perf.testing import upstream

        config = Qwen2_5OmniToken2WavConfig(**copy.deepcopy(self.scale.token2wav))
        return upstream.build_transformers_token2wav(config).to(self.machine.device)

    def _build_sampler(self, precision: str) -> "Sampler":
        """One for each precision: it keeps what it computes from the weights."""
        import torch

        from vllm_omni_audio_perf.token2wav import BlockDiT, Sampler, cast_linear_layers

        model = self.token2wav().code2wav_dit_model
        if precision != BF16:
            return Sampler(BlockDiT(model))
        model = copy.deepcopy(model)
        cast_linear_layers(model, torch.bfloat16)
        return Sampler(BlockDiT(model, linear_dtype=torch.bfloat16))

    def _clip(self, frames: int, index: int = 0) -> "Clip":
        import torch

        from vllm_omni_audio_perf.token2wav import Clip

        dit = self.samplers[FP32]().dit
        generator = torch.Generator().manual_seed(100_000 * index + frames)
        tensors = (
            torch.randint(0, dit.codebook_size - 1, (frames // dit.repeats,), generator=generator),
            torch.randn(1, dit.model.config.enc_emb_dim, generator=generator),
            torch.randn(1, REFERENCE_FRAMES, dit.mel_dim, generator=generator),
            torch.randn(1, frames, dit.mel_dim, generator=generator),
        )
        return Clip(*(tensor.to(self.machine.device) for tensor in tensors))

    def _clips(self, frames: Sequence[int]) -> "list[Clip]":
        return [self._clip(length, index) for index, length in enumerate(frames)]

    def _stock(self, clip: "Clip") -> "Callable[[], Tensor]":
        """What evaluates transformers' class: the velocity ``[frames, mel_dim]``."""
        from vllm_omni_audio_perf.token2wav.solver import evaluation_times, sway_time_grid

        sampler = self.samplers[FP32]()
        theirs, scale = self.token2wav().code2wav_dit_model, sampler.guidance_scale
        grid = sway_time_grid(sampler.num_steps, sampler.sway_coefficient, device=clip.noise.device)
        moment = evaluation_times(grid, sampler.solver)[EVALUATION]
        speaker = clip.speaker.unsqueeze(1).expand(1, clip.noise.shape[1], -1)

        def evaluate() -> "Tensor":
            conditional, unconditional = theirs(
                hidden_states=clip.noise,
                condition_vector=clip.reference_mel,
                speaker_embedding=speaker,
                quantized_code=clip.codes.unsqueeze(0),
                time_step=moment,
            )
            return conditional + (conditional - unconditional) * scale

        return evaluate

    @contextmanager
    def _captured(self, sampler: "Sampler", blocks: int) -> "Iterator[GraphRunner]":
        """The sampler with a graph for so many blocks."""
        with self.machine.graph(partial(sampler.capture, [blocks]), (blocks,)) as runner:
            try:
                yield runner
            finally:
                sampler.graphs = None

    # ------------------------------------------------------------------------------------------------------- parity

    def _eager_to_stock(self, frames: int) -> Row:
        clip = self._clip(frames)
        evaluation = Evaluation(self.samplers[FP32](), [clip])
        (ours,) = evaluation.frames(evaluation.eager())
        return {"rel_error": rel_error(ours, self._stock(clip)())}

    def _graph_to_eager(self, frames: Sequence[int]) -> Row:
        """In a graph of a few blocks more than there are."""
        evaluation = Evaluation(self.samplers[FP32](), self._clips(frames))
        expected = evaluation.frames(evaluation.eager())
        with self._captured(evaluation.sampler, evaluation.layout.blocks + 3):
            actual = evaluation.frames(evaluation.graph())
        return {"rel_error": _largest_error(actual, expected)}

    def _packed_to_alone(self) -> Row:
        clips, sampler = self._clips(self.scale.packed), self.samplers[FP32]()
        together = Evaluation(sampler, clips)
        alone = [Evaluation(sampler, [clip]) for clip in clips]
        expected = [one.frames(one.eager())[0] for one in alone]
        return {"rel_error": _largest_error(together.frames(together.eager()), expected)}

    def _groups_to_whole(self) -> Row:
        clips, sampler = [self._clip(self.scale.grouped)], self.samplers[FP32]()
        whole = Evaluation(sampler, clips, group_mib=16 * 1024)
        parts = Evaluation(sampler, clips, group_mib=self.scale.small_group_mib)
        groups = len(parts.layout.groups)
        if groups <= len(whole.layout.groups):
            raise RuntimeError(f"{groups} groups of {self.scale.small_group_mib} MiB are not more than without a limit")
        return {"rel_error": rel_error(*(one.frames(one.eager())[0] for one in (parts, whole))), "groups": groups}

    # ------------------------------------------------------------------------------------------------------ timings

    def _evaluation(self, frames: int, requests: int, precision: str, mode: str) -> Row:
        """An evaluation; its error is to our eager one in float32, that of a stock one the same."""
        import torch

        if mode == STOCK:
            evaluate = self._stock(self._clip(frames))
            figures, velocity = self.machine.time(evaluate), evaluate()
        else:
            evaluation = Evaluation(self.samplers[precision](), self._clips([frames] * requests))
            if mode == EAGER:
                figures, packed = self.machine.time(evaluation.eager), evaluation.eager()
            else:
                with self._captured(evaluation.sampler, evaluation.layout.blocks) as runner:
                    figures, packed = self.machine.time_graph(runner, evaluation.graph), evaluation.graph()
            velocity = torch.cat(evaluation.frames(packed))
        if (precision, mode) == (FP32, EAGER):
            self._expected[frames, requests] = velocity
            return figures
        if (frames, requests) not in self._expected:
            with self.machine.precision(FP32):
                reference = Evaluation(self.samplers[FP32](), self._clips([frames] * requests))
                self._expected[frames, requests] = torch.cat(reference.frames(reference.eager()))
        return figures | {"rel_error": rel_error(velocity, self._expected[frames, requests])}

    def _solve(self, frames: int, precision: str, mode: str) -> Row:
        """A whole solve; its error is to our eager one in float32."""
        import torch

        clip = self._clip(frames)
        torch.manual_seed(frames)  # transformers draws the noise itself
        clip = clip._replace(noise=torch.randn(clip.noise.shape, device=self.machine.device))
        if mode == STOCK:
            theirs = self.token2wav().code2wav_dit_model

            def solve() -> "Tensor":
                torch.manual_seed(frames)
                return theirs.sample(clip.speaker, clip.reference_mel, clip.codes.unsqueeze(0))[:, :, :frames]

            figures, mel = self._timed_solve(solve)
        else:
            sampler = self.samplers[precision]()
            if mode == EAGER:
                figures, mel = self._timed_solve(lambda: sampler.sample([clip])[0])
            else:
                blocks = sampler.dit.layout([frames], guided=True).blocks
                with self._captured(sampler, blocks) as runner:
                    figures, mel = self._timed_solve(lambda: sampler.sample([clip])[0], runner)
        if (precision, mode) == (FP32, EAGER):
            self._mels[frames] = mel
            return figures
        if frames not in self._mels:
            with self.machine.precision(FP32):
                (self._mels[frames],) = self.samplers[FP32]().sample([clip])
        return figures | {"rel_error": rel_error(mel, self._mels[frames])}

    def _timed_solve(self, solve: "Callable[[], Tensor]", runner: "GraphRunner | None" = None) -> "tuple[Row, Tensor]":
        """The figures of a solve, and the mel of the last one that was timed."""
        mels: list[Tensor] = []

        def keep() -> None:
            mels[:] = [solve()]

        figures = self.machine.time(keep) if runner is None else self.machine.time_graph(runner, keep)
        return figures, mels[0]

    def _vocode(self, piece_frames: int) -> Row:
        """The waveform of a mel; its error is to the whole one in float32."""
        import torch

        from vllm_omni_audio_perf.token2wav.vocoder import vocode

        vocoder, dit = self.token2wav().code2wav_bigvgan_model, self.samplers[FP32]().dit
        generator = torch.Generator().manual_seed(0)
        mel = torch.randn(1, dit.mel_dim, self.scale.vocoder_frames, generator=generator).to(self.machine.device)
        waveforms: list[Tensor] = []

        def run() -> None:
            waveforms[:] = [vocode(vocoder, mel, piece_frames=piece_frames)]

        figures = self.machine.time(run)
        if not self._waveforms:
            with self.machine.precision(FP32):
                self._waveforms.append(vocode(vocoder, mel, piece_frames=self.scale.vocoder_frames))
        return figures | {"rel_error": rel_error(waveforms[0], self._waveforms[0])}


def _largest_error(actual: "Sequence[Tensor]", expected: "Sequence[Tensor]") -> float:
    """Of the clips, whose number must be the same. NaN is larger than any."""
    errors = [rel_error(one, other) for one, other in zip(actual, expected, strict=True)]
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


# ----------------------------------------------------------------------------------------------------------- decoder


class DecoderCells:
    """Measurements of MiMo-Audio's decoder."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.scale = machine.scale
        self.decoders = {precision: Once(partial(self._build, precision)) for precision in (FP32, BF16)}

    def parity(self) -> list[Cell]:
        """The checks."""
        mixed = list(self.scale.mixed_codes)
        row = {"part": "MiMo decoder", "codes": mixed, "requests": len(mixed)}
        exact, rounded = row | {"precision": FP32, "limit": LIMIT}, row | {"precision": BF16}
        to_eager = {"case": "padded graph to eager", "mode": GRAPH}
        return [
            Cell(exact | {"case": "together to alone", "mode": EAGER}, _PARITY, self._together_to_alone),
            Cell(exact | to_eager, _PARITY, partial(self._graph_to_eager, FP32)),
            Cell(rounded | to_eager, _PARITY, partial(self._graph_to_eager, BF16)),
            Cell(rounded | {"case": "bf16 to fp32", "mode": EAGER}, _PARITY, self._bf16_to_fp32),
        ]

    def timings(self) -> list[Cell]:
        """The measurements of time and memory."""
        return [
            Cell(
                {"part": "MiMo decoder", "codes": codes, "requests": batch, "precision": BF16, "mode": mode},
                _DECODER,
                partial(self._decode, codes, batch, mode),
            )
            for codes in self.scale.codes
            for batch in self.scale.batches
            for mode in (EAGER, GRAPH)
        ]

    def _build(self, precision: str) -> "FixedShapeDecoder":
        import torch

        from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder

        dtype = torch.bfloat16 if precision == BF16 else torch.float32
        decoder = FixedShapeDecoder.from_config(self.scale.decoder, device=self.machine.device, dtype=dtype)
        if precision == BF16:
            decoder.load_state_dict(self.decoders[FP32]().state_dict())
        else:
            randomize_decoder(decoder)
        return decoder

    def _requests(self, lengths: Sequence[int], padded_to: int) -> "tuple[Tensor, Tensor]":
        """Codes ``[batch, rows, padded_to]`` and lengths, random."""
        import torch

        sizes = self.decoders[FP32]().codebook_sizes[: mimo_audio.ROWS]
        codes = torch.zeros(len(lengths), len(sizes), padded_to, dtype=torch.long)
        for index, (row, length) in enumerate(zip(codes, lengths, strict=True)):
            generator = torch.Generator().manual_seed(1000 * index + length)
            row[:, :length] = torch.stack([torch.randint(0, size, (length,), generator=generator) for size in sizes])
        return codes.to(self.machine.device), torch.tensor(lengths, device=self.machine.device)

    def _mixed(self) -> "tuple[Tensor, Tensor]":
        return self._requests(self.scale.mixed_codes, max(self.scale.mixed_codes))

    @contextmanager
    def _captured(self, decoder: "FixedShapeDecoder", shape: tuple[int, int, int]) -> "Iterator[GraphRunner]":
        from vllm_omni_audio_perf.mimo_audio.batch_decoder import graph_runner

        def build(**arguments: Any) -> "GraphRunner":
            runner = graph_runner(decoder, [shape], **arguments)
            runner.capture_all()
            return runner

        with self.machine.graph(build, shape) as runner:
            yield runner

    def _valid(self, decoder: "FixedShapeDecoder", waveforms: "Tensor") -> "list[Tensor]":
        """Of each of the mixed requests its samples."""
        counts = [length * decoder.samples_per_code for length in self.scale.mixed_codes]
        return [waveform[:count] for waveform, count in zip(waveforms, counts, strict=True)]

    def _together_to_alone(self) -> Row:
        decoder = self.decoders[FP32]()
        codes, lengths = self._mixed()
        together = self._valid(decoder, decoder.decode(codes, lengths)[0])
        alone = [
            decoder.decode(codes[index : index + 1, :, :length], lengths[index : index + 1])[0][0]
            for index, length in enumerate(self.scale.mixed_codes)
        ]
        return {"rel_error": _largest_error(together, alone)}

    def _graph_to_eager(self, precision: str) -> Row:
        """In a graph of more requests and more codes than there are."""
        decoder = self.decoders[precision]()
        codes, lengths = self._mixed()
        batch, rows, longest = codes.shape
        expected = self._valid(decoder, decoder.decode(codes, lengths)[0])
        with self._captured(decoder, (batch + 2, longest + 7, rows)) as runner:
            waveforms, _ = runner((batch, longest, rows), codes, lengths)
        return {"rel_error": _largest_error(self._valid(decoder, waveforms), expected)}

    def _bf16_to_fp32(self) -> Row:
        codes, lengths = self._mixed()
        actual, expected = (
            self._valid(decoder, decoder.decode(codes, lengths)[0])
            for decoder in (self.decoders[BF16](), self.decoders[FP32]())
        )
        return {"rel_error": _largest_error(actual, expected)}

    def _decode(self, codes: int, batch: int, mode: str) -> Row:
        """From codes to samples, both on the device."""
        decoder = self.decoders[BF16]()
        inputs = self._requests([codes] * batch, codes)
        if mode == EAGER:
            return self.machine.time(lambda: decoder.decode_varlen(*inputs))
        shape = (batch, codes, inputs[0].shape[1])
        expected, _ = decoder.decode_varlen(*inputs)
        with self._captured(decoder, shape) as runner:
            figures = self.machine.time_graph(runner, lambda: runner(shape, *inputs))
            actual, _ = runner(shape, *inputs)
        return figures | {"rel_error": rel_error(actual, expected)}


def randomize_decoder(decoder: "FixedShapeDecoder") -> None:
    """Draw the weights of a decoder so that every part of it matters and activations stay of order one."""
    import torch

    generator = torch.Generator(decoder.device).manual_seed(0)

    def draw(tensor: "Tensor") -> "Tensor":
        return torch.randn(tensor.shape, generator=generator, device=tensor.device)

    with torch.no_grad():
        for name, parameter in decoder.decoder.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(draw(parameter) * parameter[0].numel() ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * draw(parameter))
            else:  # of a norm
                parameter.copy_(1 + 0.2 * draw(parameter))
        window = decoder.decoder.vocoder.head.istft.window
        window.copy_(torch.hann_window(len(window)))
        codebooks = [tensor for name, tensor in decoder.named_buffers() if name.endswith("_codebook.embed")]
        for index, codebook in enumerate(codebooks):  # each codes what the ones before it left over
            codebook.copy_(draw(codebook) * 0.8**index)


# --------------------------------------------------------------------------------------------------------- reporting


def summary(head: Row, rows: Sequence[Row], seconds: float) -> list[str]:
    """What stands above the table."""
    device, versions = head["device"], head["versions"]
    checks = [row for row in rows if "limit" in row]
    ok, bad = sum(row.get("ok", False) for row in checks), sum(failed(row) for row in checks)
    about = [f"{name} {device[name]}" for name in ("driver", "cuda", "cudnn") if device.get(name)]
    about += [f"{name} {version}" for name, version in versions.items() if version]
    left_out = sum("left_out" in row for row in rows)
    return [
        head["command"],
        f"{head['date']}, {device['name']}, {', '.join(about)}",
        *head["notes"],
        "size: mel frames (f) or codes (c) of each request, of which there are n. ms: the median of some calls.",
        "x: times faster than `stock` in fp32, which takes one request after the other.",
        "MiB: at the peak, beside models and inputs; a graph's with what it holds. err: relative; where no comparison "
        "is named, to eager, of the DiT and the vocoder in fp32.",
        f"{len(rows)} measurements in {seconds:.0f} s, {left_out} left out; {len(checks)} parity checks "
        f"(err <= {LIMIT:g}): {ok} ok, {bad} failed, {len(checks) - ok - bad} not made.",
    ]


def table(rows: Sequence[Row]) -> str:
    """The figures for people, as a table in Markdown: stock, eager and graph side by side."""
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(_identity(row), {})[row["mode"]] = row
    columns = [
        (f"{mode} {unit}", mode, name, form, factor)
        for unit, name, form, factor, modes in (
            ("ms", "seconds", "{:.4g}", 1000, (STOCK, EAGER, GRAPH)),
            ("x", "speedup", "{:.2f}", 1, (EAGER, GRAPH)),
            ("MiB", "extra_mib", "{:.0f}", 1, (STOCK, EAGER, GRAPH)),
            ("err", "rel_error", "{:.0e}", 1, (EAGER, GRAPH)),
        )
        for mode in modes
        if any(name in row for row in rows if row["mode"] == mode)
    ]
    text = [["what", "size", "n", "type", *(title for title, *_ in columns), "result"]]
    for identity, modes in lines.items():
        figures = [
            form.format(modes[mode][name] * factor) if name in modes.get(mode, {}) else ""
            for _, mode, name, form, factor in columns
        ]
        problems = "; ".join(filter(None, map(_problem, modes.values())))
        text.append([*identity, *figures, problems or ("ok" if any(row.get("ok") for row in modes.values()) else "")])
    *padded, _ = zip(*text, strict=True)
    widths = [max(map(len, column)) for column in padded]
    out = [f"| {' | '.join(map(str.ljust, cells, widths))} | {cells[-1]} |" for cells in text]
    out.insert(1, "|" + "|".join("-" * (width + 2) for width in [*widths, len(text[0][-1])]) + "|")
    return "\n".join(out)


def _identity(row: Row) -> tuple[str, ...]:
    """What tells a line of the table from the others: what it is of, size, requests and precision."""
    what = f"{row['part']}, {row['case']}" if "case" in row else row["part"]
    size, unit = (row["frames"], "f") if "frames" in row else (row["codes"], "c")
    size = f"{min(size)}-{max(size)}" if isinstance(size, list) and len(size) > 1 else str(size).strip("[]")
    return what, f"{size} {unit}", str(row["requests"]), row["precision"]


def _problem(row: Row) -> str:
    """What is wrong with a row, or nothing."""
    if "ok" in row:
        return "" if row["ok"] else f"{row['mode']}: FAIL, {row['rel_error']:.1e}"
    if "error" in row:
        return f"{row['mode']}: {'FAIL, ' if 'limit' in row else ''}{row['error'][:120]}"
    return f"{row['mode']}: {row['left_out']}" if "left_out" in row else ""
