# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench mimo_audio`: decoding MiMo-Audio's codes, for some lengths and batches.

Random weights, the same for all variants, which use them in place. A *row* is one length and one batch.
"""

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni_audio_perf.benchmarks import harness
from vllm_omni_audio_perf.benchmarks.harness import Device, Run, Variant
from vllm_omni_audio_perf.benchmarks.report import Row, compared

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("stock", "stock_fixed", "plugin")
ROWS = 8  # of codes, as MiMo-Audio's talker makes them
TAIL_SAMPLES = 360
WARM_UP_CODES = 4
MIXED = (1.0, 0.9, 0.5, 0.75, 0.25, 0.6, 0.35, 0.1)

# The real tokenizer's sizes, but for the encoder, which takes no part. Tests override them.
SIZES: dict[str, Any] = {
    "avg_pooler": 2,
    "d_model": 1280,
    "encoder_layers": 1,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 64,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "nfft": 960,
    "window_size": 960,
    "vocoder_dim": 256,
    "vocoder_intermediate_dim": 1024,
    "vocoder_num_layers": 16,
    "vocoder_attention_heads": 16,
    "n_mels": 128,
    "num_quantizers": 20,
    "codebook_size": [1024, 1024, 128],
    "scale_embedding": False,
}

Decode = Callable[["list[Tensor]"], "list[Tensor]"]
"""From the codes ``[rows, codes]`` of each request to its samples ``[samples]``."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench mimo_audio`."""
    parser = subparsers.add_parser(
        "mimo_audio",
        help="decoding MiMo-Audio's codes, for some lengths and batches",
        description="Measure the decoding of MiMo-Audio's codes at the sizes of the real tokenizer, with random "
        "weights. `stock` decodes the requests of a step as vLLM-Omni does without graphs, in one packed batch; "
        "`stock_fixed` as its CUDA graph wrapper does, one by one and padded to a bucket of up to 256 codes (on a CPU "
        "the same function without a graph; beyond 256 codes without padding); `plugin` all at once, on a GPU in "
        "captured graphs. Errors are the largest of a request to the decode of that request alone, in all and in its "
        f"last {TAIL_SAMPLES} samples.",
    )
    parser.add_argument(
        "--codes",
        type=_numbers,
        default=[12, 120, 280],
        metavar="N[,N...]",
        help="lengths in codes of 40 ms (default: 12,120,280)",
    )
    parser.add_argument(
        "--batch", type=_numbers, default=[1, 4, 8], metavar="N[,N...]", help="requests in a decode (default: 1,4,8)"
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="make the requests of a batch differ in length: the first has all codes, others down to a tenth",
    )
    parser.add_argument(
        "--decoder-layers",
        type=harness.positive,
        default=32,
        metavar="N",
        help="layers of the decoder; fewer are bearable on a CPU (default: 32, as the real one)",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default: float32")
    parser.add_argument(
        "--memory", action="store_true", help="also measure extra memory, each figure in a process of its own"
    )
    harness.add_options(parser, VARIANTS, default=VARIANTS)
    parser.set_defaults(run=partial(run, parser))


def _numbers(text: str) -> list[int]:
    """An argparse type: a comma-separated list of whole numbers from 1, returned ascending and each once."""
    return sorted({harness.positive(item) for item in text.split(",")})


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure and report: a table on stdout, the JSON and the plot where asked for. Returns the exit code.

    Raises:
        ValueError: for settings that cannot be used here, and without vLLM-Omni, whose class is the baseline.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the table
    harness.check_outputs(args)
    if importlib.util.find_spec("vllm_omni") is None or importlib.util.find_spec("vllm") is None:
        raise ValueError("bench mimo_audio needs vLLM-Omni, whose decoder is the baseline")
    device = Device(args.device, args.threads, args.tf32)
    device.apply()
    own = ["codes", "batch", "mixed", "decoder_layers", "dtype", "memory"]
    settings = {name: getattr(args, name) for name in [*own, "variants", "pairs", "device", "threads", "tf32", "seed"]}
    command = harness.command_line(parser, settings, "codes")
    rows: list[Row] = []
    exit_code = 0

    def save() -> None:
        if args.json is not None:
            result = {
                "benchmark": "mimo_audio",
                "command": command,
                "date": date.today().isoformat(),
                "versions": harness.versions(),
                "device": device.describe(),
                "settings": settings | {"tail_samples": TAIL_SAMPLES},
                "rows": rows,
            }
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    try:
        for rows[:] in measure_batches(args, device):
            save()
    except KeyboardInterrupt:
        if not rows:
            raise
        exit_code = 130
    save()
    print(table(rows, args.variants))
    print("Seconds and ratios are medians over the rounds (smallest to largest).")
    if args.plot is not None:
        where = device.describe()
        title = f"Decoding MiMo-Audio's codes, {args.dtype}, {args.decoder_layers} decoder layers\n"
        plot(rows, args.variants, args.plot, title=f"{title}{where['name']}, {where['threads']} threads")
    return exit_code


def measure_batches(args: argparse.Namespace, device: Device) -> Iterator[list[Row]]:
    """Measure batch after batch; after each round all rows so far."""
    done: list[Row] = []
    decoders = build_decoders(args)
    device.apply()
    for batch in args.batch:
        variants = build_variants(args, batch, decoders)
        errors = {codes: errors_of(args, decoders, codes, batch) for codes in args.codes}
        found: list[Row] = []
        for found in harness.measure(variants, args.codes, args.pairs, device, length_name="codes"):
            for row in found:
                row |= {"batch": batch} | errors[row["codes"]]
            yield [*done, *found]
        if args.memory:
            for row in found:
                for name in args.variants:
                    build = partial(build_variants, args, batch)
                    row[f"{name}_extra_mib"] = harness.extra_memory(build, name, row["codes"], device, WARM_UP_CODES)
        done += found
    yield done


def build_variants(args: argparse.Namespace, batch: int, decoders: dict[str, Decode] | None = None) -> list[Variant]:
    """The variants for one batch. A run returns nothing to compare: errors are to each request alone."""
    decoders = decoders or build_decoders(args)

    def prepare(decode: Decode, codes: int) -> Run:
        requests = make_requests(args, codes, batch)

        def decode_all() -> None:
            decode(requests)

        return decode_all

    return [Variant(name, partial(prepare, decoders[name])) for name in args.variants]


def make_requests(args: argparse.Namespace, codes: int, batch: int) -> "list[Tensor]":
    """The codes of a batch, int64 ``[ROWS, codes]`` each on the CPU, the same for every variant."""
    import torch

    generator = torch.Generator().manual_seed(args.seed)
    sizes = SIZES["codebook_size"]
    sizes = torch.tensor([*sizes, *[sizes[-1]] * ROWS][:ROWS])[:, None]
    lengths = [max(1, round(codes * MIXED[index % len(MIXED)])) if args.mixed else codes for index in range(batch)]
    return [(torch.rand(ROWS, length, generator=generator) * sizes).long() for length in lengths]


def build_decoders(args: argparse.Namespace) -> dict[str, Decode]:
    """One tokenizer and each variant's way to decode with it; beside them, as "alone", each request by itself."""
    import torch
    from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioTokenizerConfig
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    torch.manual_seed(args.seed)
    sizes = SIZES | {"decoder_layers": args.decoder_layers, "codebook_size": list(SIZES["codebook_size"])}
    tokenizer: Any = MiMoAudioTokenizer(MiMoAudioTokenizerConfig(**sizes))
    for index, layer in enumerate(tokenizer.encoder.quantizer.vq.layers):
        layer._codebook.embed.normal_().mul_(0.8**index)
    tokenizer = tokenizer.to(args.device, getattr(torch, args.dtype)).eval()

    def alone(requests: "list[Tensor]") -> "list[Tensor]":
        return [tokenizer.decode(codes.to(args.device)).float().reshape(-1) for codes in requests]

    return {
        "alone": alone,
        "stock": partial(_decode_packed, tokenizer, args.device),
        "stock_fixed": _fixed(tokenizer, args.device),
        "plugin": _plugin(tokenizer, args),
    }


def _decode_packed(tokenizer: Any, device: str, requests: "list[Tensor]") -> "list[Tensor]":
    """As vLLM-Omni's stage without graphs: one call of the decoder for the packed requests."""
    import torch

    hidden = [tokenizer.encoder.decode_vq(codes.to(device)) for codes in requests]
    lengths = torch.tensor([len(one) for one in hidden], device=device)
    waveforms = tokenizer.decoder(torch.cat(hidden), lengths).float().reshape(len(requests), -1)
    samples = waveforms.shape[1] // int(lengths.max())
    return [waveform[: samples * codes.shape[1]] for waveform, codes in zip(waveforms, requests, strict=True)]


def _fixed(tokenizer: Any, device: str) -> Decode:
    """As vLLM-Omni's CUDA graph wrapper; on a CPU what it captures, called."""
    import torch
    from vllm_omni.model_executor.models.mimo_audio.cuda_graph_decoder_wrapper import CUDAGraphMiMoDecoderWrapper
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import TransformerVocos

    wrapper = CUDAGraphMiMoDecoderWrapper(tokenizer, code_rows=[ROWS])
    if device == "cuda":
        wrapper.warmup(torch.device(device))
    window = tuple(tokenizer.config.vocoder_attn_window_size)

    def decode(codes: "Tensor") -> "Tensor":
        if device == "cuda":
            return wrapper.decode(codes.to(device))
        length = codes.shape[1]
        bucket = next((size for size in wrapper.DEFAULT_CAPTURE_SIZES if size >= length), None)
        if bucket is None:
            return tokenizer.decode(codes)
        padded = torch.nn.functional.pad(codes, (0, bucket - length))
        frames, of_bucket = wrapper._compute_vocoder_seq_len(length), wrapper._compute_vocoder_seq_len(bucket)
        mask = TransformerVocos.build_vocoder_attn_mask(
            of_bucket, frames, window, codes.device, tokenizer.decoder.layer_norm.weight.dtype
        )
        waveform = tokenizer.decode_fixed(padded, bucket, vocoder_attn_mask=mask)
        return waveform[..., : wrapper._compute_output_wav_len(length)]

    return lambda requests: [decode(codes).float().reshape(-1) for codes in requests]


def _plugin(tokenizer: Any, args: argparse.Namespace) -> Decode:
    from vllm_omni_audio_perf.graphs import CaptureBudget, CudaGraphBackend
    from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder
    from vllm_omni_audio_perf.mimo_audio.batch_decoder import BatchDecoder, graph_runner

    decoder = FixedShapeDecoder(tokenizer)
    if args.device != "cuda":
        return BatchDecoder(decoder).decode
    shapes = [(batch, codes, ROWS) for batch in args.batch for codes in args.codes]
    runner = graph_runner(decoder, shapes, backend=CudaGraphBackend(), budget=CaptureBudget(seconds=600, mib=64 * 1024))
    runner.capture_all()
    return BatchDecoder(decoder, runner).decode


def errors_of(args: argparse.Namespace, decoders: dict[str, Decode], codes: int, batch: int) -> Row:
    """The largest error of a request to its decode alone, of each variant: of all of it, and of its end."""
    import torch

    requests = make_requests(args, codes, batch)
    row: Row = {}
    with torch.inference_mode():
        expected = [waveform.cpu().double() for waveform in decoders["alone"](requests)]
        for name in args.variants:
            actual = [waveform.cpu().double() for waveform in decoders[name](requests)]
            pairs = list(zip(actual, expected, strict=True))
            row[f"{name}_rel_error"] = max(_rel_error(one, other) for one, other in pairs)
            row[f"{name}_tail_rel_error"] = max(
                _rel_error(one[-TAIL_SAMPLES:], other[-TAIL_SAMPLES:]) for one, other in pairs
            )
    return row


def _rel_error(actual: "Tensor", expected: "Tensor") -> float:
    if actual.shape != expected.shape:
        raise RuntimeError(f"the variants differ in shape: {tuple(actual.shape)} against {tuple(expected.shape)}")
    return float((actual - expected).norm() / expected.norm())


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """The figures for people: a line a length and batch."""
    from prettytable import PrettyTable

    columns: list[tuple[str, str, str]] = [("codes", "codes", "{}"), ("batch", "batch", "{}")]
    columns += [(f"{name}, s", f"{name}_seconds", "{:.3g}") for name in names]
    columns += [
        (f"{name}: speed-up", f"{prefix}speedup", "{:.2f}x")
        for name, prefix in compared(names)
        if prefix or len(names) < 3
    ]
    columns += [(f"{name}: error", f"{name}_rel_error", "{:.0e}") for name in names]
    columns += [(f"{name}: error at the end", f"{name}_tail_rel_error", "{:.0e}") for name in names]
    columns += [(f"{name}, MiB", f"{name}_extra_mib", "{:.0f}") for name in names]
    columns = [column for column in columns if any(column[1] in row for row in rows)]
    out = PrettyTable([title for title, _, _ in columns], align="r")
    for row in rows:
        cells = []
        for _, field, form in columns:
            cell = form.format(row[field]) if field in row else "-"
            if f"{field}_min" in row and field.endswith("speedup"):
                cell += f" ({form.format(row[f'{field}_min'])} to {form.format(row[f'{field}_max'])})"
            cells.append(cell)
        out.add_row(cells)
    return out.get_string()


def plot(rows: Sequence[Row], names: Sequence[str], path: Path, *, title: str) -> None:
    """Draw a PNG: seconds over codes, a panel a batch, and errors over codes in a last one."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(3.6 * (len(batches) + 1), 4), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    *panels, of_errors = figure.subplots(1, len(batches) + 1)
    for axes, batch in zip(panels, batches, strict=True):
        own = [row for row in rows if row["batch"] == batch]
        for name in names:
            axes.plot([row["codes"] for row in own], [row[f"{name}_seconds"] for row in own], "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="codes", ylabel="seconds", title=f"batch {batch}")
        axes.legend()
    for name in names:
        points = [(row["codes"], row[f"{name}_tail_rel_error"]) for row in rows if row[f"{name}_tail_rel_error"] > 0]
        if points:
            of_errors.plot(*zip(*points, strict=True), "o", label=name)
    of_errors.set(xscale="log", yscale="log", xlabel="codes", title="error at the end")
    if of_errors.get_legend_handles_labels()[0]:
        of_errors.legend()
    for axes in (*panels, of_errors):
        axes.set_xticks(sorted({row["codes"] for row in rows}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
    figure.savefig(path, format="png", dpi=150)
