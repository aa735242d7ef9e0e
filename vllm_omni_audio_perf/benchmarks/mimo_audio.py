# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench mimo_audio`: decoding MiMo-Audio's codes, for some lengths and batches.

Random weights, the same for all variants, which use them in place. A *row* is one length and one batch.
"""

import argparse
import copy
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

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
"""From the codes ``[rows, codes]`` of each request to its samples, float32 ``[samples]``, both on the CPU."""


@dataclass(frozen=True)
class Decoders:
    """Ways to decode with the weights of one tokenizer."""

    variants: dict[str, Decode]
    """Those that are measured, by name."""

    alone: Decode
    """Each request by itself and without padding: what the variants are compared with."""

    alone_fp32: Decode | None
    """The same with the weights in float32, before they were rounded; None where `alone` is that."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench mimo_audio`."""
    parser = subparsers.add_parser(
        "mimo_audio",
        help="decoding MiMo-Audio's codes, for some lengths and batches",
        description="Measure the decoding of MiMo-Audio's codes at the sizes of the real tokenizer, with random "
        "weights. `stock` decodes the requests of a step as vLLM-Omni does without graphs, in one packed batch; "
        "`stock_fixed` as its CUDA graph wrapper does, one by one and padded to a bucket of up to 256 codes (on a CPU "
        "the same function without a graph; beyond 256 codes it falls back to decoding without padding and without a "
        "graph, which the table calls `eager`); `plugin` all at once, on a GPU in captured graphs. All start from "
        "codes and end with samples in the host's memory. Errors are the largest of a request to the decode of that "
        f"request alone in the same dtype, in all and in its last {TAIL_SAMPLES} samples, and in bfloat16 also to the "
        "decode in float32.",
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
        help=f"make the requests of a batch differ in length (x{', x'.join(f'{share:g}' for share in MIXED)}), "
        "which shows how they change each other in the batches of `stock` (default: all of one length)",
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
        "--memory",
        action="store_true",
        help="also measure extra memory, each figure in a process of its own; it is that of a decode, without what "
        "captured graphs hold before it",
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
    memory = harness.memory_method(device) if args.memory else None
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
                "settings": settings | {"tail_samples": TAIL_SAMPLES, "memory": memory},
                "rows": rows,
            }
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    try:
        for rows[:] in measure_batches(args, device):
            save()
        if args.memory:
            build = partial(_build_in_a_process, args)
            for found in harness.add_memory(
                rows, args.variants, build, device, WARM_UP_CODES, length_name="codes", fields=["batch"]
            ):
                exit_code = exit_code if found else 1
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
        lengths = tqdm(args.codes, desc=f"batch {batch}: errors", unit="length")
        errors = {codes: errors_of(args, decoders, codes, batch) for codes in lengths}
        found: list[Row] = []
        for found in harness.measure(
            build_variants(args, batch, decoders.variants),
            args.codes,
            args.pairs,
            device,
            length_name="codes",
            description=f"batch {batch}",
        ):
            for row in found:
                row |= {"batch": batch} | errors[row["codes"]]
            yield [*done, *found]
        done += found


def build_variants(
    args: argparse.Namespace,
    batch: int,
    variants: dict[str, Decode] | None = None,
    *,
    sizes: dict[str, Any] | None = None,
) -> list[Variant]:
    """The variants for one batch. A run returns nothing to compare: errors are to each request alone.

    Args:
        args: of the command.
        batch: requests in a decode.
        variants: as `build_decoders` makes them; None to build them.
        sizes: of the tokenizer; None for `SIZES`.
    """
    variants = variants or build_decoders(args, sizes).variants

    def prepare(decode: Decode, codes: int) -> Run:
        requests = make_requests(args, codes, batch, sizes)

        def decode_all() -> None:
            decode(requests)

        return decode_all

    return [Variant(name, partial(prepare, decode)) for name, decode in variants.items()]


def _build_in_a_process(args: argparse.Namespace, row: Row, name: str) -> Callable[[], list[Variant]]:
    """What builds one variant for the batch of a row, and can be pickled, as the parser in the arguments cannot."""
    needed = ("codes", "mixed", "decoder_layers", "dtype", "device", "seed")
    own = {field: getattr(args, field) for field in needed} | {"batch": [row["batch"]], "variants": [name]}
    return partial(build_variants, argparse.Namespace(**own), row["batch"], sizes=SIZES)


def make_requests(
    args: argparse.Namespace, codes: int, batch: int, sizes: dict[str, Any] | None = None
) -> "list[Tensor]":
    """The codes of a batch, int64 ``[ROWS, codes]`` each on the CPU, the same for every variant."""
    import torch

    generator = torch.Generator().manual_seed(args.seed)
    books = (SIZES if sizes is None else sizes)["codebook_size"]
    entries = torch.tensor([*books, *[books[-1]] * ROWS][:ROWS])[:, None]
    lengths = [max(1, round(codes * MIXED[index % len(MIXED)])) if args.mixed else codes for index in range(batch)]
    return [(torch.rand(ROWS, length, generator=generator) * entries).long() for length in lengths]


def build_decoders(args: argparse.Namespace, sizes: dict[str, Any] | None = None) -> Decoders:
    """One tokenizer and the ways to decode with it.

    Args:
        args: of the command.
        sizes: of the tokenizer, but for the layers of its decoder; None for `SIZES`.
    """
    import torch
    from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioTokenizerConfig
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    torch.manual_seed(args.seed)
    sizes = SIZES if sizes is None else sizes
    sizes = sizes | {"decoder_layers": args.decoder_layers, "codebook_size": list(sizes["codebook_size"])}
    tokenizer: Any = MiMoAudioTokenizer(MiMoAudioTokenizerConfig(**sizes)).eval()
    for index, layer in enumerate(tokenizer.encoder.quantizer.vq.layers):
        layer._codebook.embed.normal_().mul_(0.8**index)
    alone_fp32 = None
    if args.dtype != "float32":
        alone_fp32 = partial(_decode_alone, copy.deepcopy(tokenizer).to(args.device), args.device)
    tokenizer = tokenizer.to(args.device, getattr(torch, args.dtype))
    build: dict[str, Callable[[], Decode]] = {
        "stock": lambda: partial(_decode_packed, tokenizer, args.device),
        "stock_fixed": lambda: StockFixed(tokenizer, args.device),
        "plugin": lambda: _plugin(tokenizer, args),
    }
    return Decoders(
        {name: build[name]() for name in args.variants}, partial(_decode_alone, tokenizer, args.device), alone_fp32
    )


def _decode_alone(tokenizer: Any, device: str, requests: "list[Tensor]") -> "list[Tensor]":
    return [tokenizer.decode(codes.to(device)).float().reshape(-1).cpu() for codes in requests]


def _decode_packed(tokenizer: Any, device: str, requests: "list[Tensor]") -> "list[Tensor]":
    """As vLLM-Omni's stage without graphs: one call of the decoder for the packed requests."""
    import torch

    hidden = [tokenizer.encoder.decode_vq(codes.to(device)) for codes in requests]
    lengths = [len(one) for one in hidden]
    waveforms = tokenizer.decoder(torch.cat(hidden), torch.tensor(lengths, device=device))
    waveforms = waveforms.float().reshape(len(requests), -1)
    samples = waveforms.shape[1] // max(lengths)
    return [waveform[: samples * length].cpu() for waveform, length in zip(waveforms, lengths, strict=True)]


class StockFixed:
    """As vLLM-Omni's CUDA graph wrapper decodes; on a CPU what it captures, called.

    Args:
        tokenizer: upstream's.
        device: "cuda" captures graphs of all its buckets here.
    """

    def __init__(self, tokenizer: Any, device: str) -> None:
        import torch
        from vllm_omni.model_executor.models.mimo_audio.cuda_graph_decoder_wrapper import CUDAGraphMiMoDecoderWrapper

        self._tokenizer = tokenizer
        self._device = device
        self._wrapper: Any = CUDAGraphMiMoDecoderWrapper(tokenizer, code_rows=[ROWS])
        if device == "cuda":
            self._wrapper.warmup(torch.device(device))
        else:
            self._wrapper.capture_sizes = self._wrapper.compute_capture_sizes()

    def bucket(self, codes: int) -> int | None:
        """The codes that so many are padded to; None where they are decoded eagerly and without padding."""
        size = self._wrapper._get_padded_size(codes)
        captured = self._device != "cuda" or (ROWS, size) in self._wrapper.graphs
        return size if captured else None

    def __call__(self, requests: "list[Tensor]") -> "list[Tensor]":
        """Decode one request after the other."""
        return [self._decode(codes).float().reshape(-1).cpu() for codes in requests]

    def _decode(self, codes: "Tensor") -> "Tensor":
        import torch
        from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import TransformerVocos

        if self._device == "cuda":
            return self._wrapper.decode(codes.to(self._device))
        length = codes.shape[1]
        bucket = self.bucket(length)
        if bucket is None:
            return self._tokenizer.decode(codes)
        padded = torch.nn.functional.pad(codes, (0, bucket - length))
        mask = TransformerVocos.build_vocoder_attn_mask(
            self._wrapper._compute_vocoder_seq_len(bucket),
            self._wrapper._compute_vocoder_seq_len(length),
            tuple(self._tokenizer.config.vocoder_attn_window_size),
            codes.device,
            self._tokenizer.decoder.layer_norm.weight.dtype,
        )
        waveform = self._tokenizer.decode_fixed(padded, bucket, vocoder_attn_mask=mask)
        return waveform[..., : self._wrapper._compute_output_wav_len(length)]


def _plugin(tokenizer: Any, args: argparse.Namespace) -> Decode:
    from vllm_omni_audio_perf.graphs import CaptureBudget, CudaGraphBackend
    from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder
    from vllm_omni_audio_perf.mimo_audio.batch_decoder import BatchDecoder, graph_runner

    decoder = FixedShapeDecoder(tokenizer)
    if args.device != "cuda":
        return BatchDecoder(decoder).decode
    shapes = [(batch, codes, ROWS) for batch in args.batch for codes in args.codes]
    runner = graph_runner(decoder, shapes, backend=CudaGraphBackend(), budget=CaptureBudget(seconds=600, mib=64 * 1024))
    missing = set(shapes) - set(runner.capture_all())
    if missing:  # figures without a graph must not pass for figures with one
        raise RuntimeError(f"plugin: no graph could be captured for {sorted(missing)} (requests, codes, rows)")
    return BatchDecoder(decoder, runner).decode


def errors_of(args: argparse.Namespace, decoders: Decoders, codes: int, batch: int) -> Row:
    """The largest error of a request to its decode alone, of each variant: of all of it, and of its end.

    Fields with "fp32" are of the decode in float32, where that is another one. With `stock_fixed` come its buckets,
    each once, None for those decoded eagerly.
    """
    import torch

    requests = make_requests(args, codes, batch)
    row: Row = {}
    with torch.inference_mode():
        references = {"": decoders.alone(requests)}
        if decoders.alone_fp32 is not None:
            references["fp32_"] = decoders.alone_fp32(requests)
        for name, decode in decoders.variants.items():
            actual = decode(requests)
            for prefix, expected in references.items():
                pairs = list(zip(actual, expected, strict=True))
                row[f"{name}_{prefix}rel_error"] = max(_rel_error(one, other) for one, other in pairs)
                row[f"{name}_{prefix}tail_rel_error"] = max(
                    _rel_error(one[-TAIL_SAMPLES:], other[-TAIL_SAMPLES:]) for one, other in pairs
                )
            if isinstance(decode, StockFixed):
                row[f"{name}_buckets"] = list(dict.fromkeys(decode.bucket(request.shape[1]) for request in requests))
    return row


def _rel_error(actual: "Tensor", expected: "Tensor") -> float:
    if actual.shape != expected.shape:
        raise RuntimeError(f"the variants differ in shape: {tuple(actual.shape)} against {tuple(expected.shape)}")
    actual, expected = actual.double(), expected.double()
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
    columns += [(f"{name}: error to float32", f"{name}_fp32_rel_error", "{:.0e}") for name in names]
    columns += [(f"{name}: bucket", f"{name}_buckets", "{}") for name in names]
    columns += [(f"{name}, MiB", f"{name}_extra_mib", "{:.0f}") for name in names]
    columns = [column for column in columns if any(column[1] in row for row in rows)]
    out = PrettyTable([title for title, _, _ in columns], align="r")
    for row in rows:
        cells = []
        for _, field, form in columns:
            value = row.get(field)
            if isinstance(value, list):
                value = ", ".join("eager" if bucket is None else str(bucket) for bucket in value)
            cell = "-" if value is None else form.format(value)
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
