# SPDX-License-Identifier: Apache-2.0
"""How far MiMo-Audio's streamed sound is from that of one decode of all codes, for some ways to cut a stream.

    python examples/benchmarks/mimo_audio_streaming_error.py --chunk 3 --groups 60

The decoder has random weights, in the sizes of the real one but for the number of its layers (`--decoder-layers`; the
real one has 32), so the figures compare settings; they are not those of a trained model. `--plot` needs matplotlib.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from prettytable import PrettyTable
from torch import Tensor
from tqdm import tqdm

from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder
from vllm_omni_audio_perf.mimo_audio.streaming import StreamSettings, new_frames, windows

GROUP_SIZE = 4
SEAM_SAMPLES = 360  # on either side of a seam
REAL_SIZE = {
    "avg_pooler": 2,
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "nfft": 960,
    "vocoder_dim": 256,
    "vocoder_intermediate_dim": 1024,
    "vocoder_num_layers": 16,
    "vocoder_attention_heads": 16,
    "n_mels": 128,
    "num_quantizers": 8,
    "codebook_size": [1024, 1024, 128],
}


def random_decoder(decoder_layers: int) -> FixedShapeDecoder:
    """A decoder whose attention is not uniform, as a trained one's is not."""
    decoder = FixedShapeDecoder.from_config(REAL_SIZE | {"decoder_layers": decoder_layers})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.normal_(generator=generator).mul_(0.2).add_(name.endswith("weight"))
            elif parameter.ndim > 1:
                parameter.normal_(generator=generator).mul_(1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.normal_(generator=generator).mul_(0.05)
        decoder.decoder.vocoder.head.out.weight.mul_(0.3)
        for name, buffer in decoder.named_buffers():
            if name.endswith("embed"):
                buffer.normal_(generator=generator)
            else:
                buffer.copy_(torch.hann_window(len(buffer)))
    return decoder


def decode(decoder: FixedShapeDecoder, codes: Tensor) -> Tensor:
    """One request, ``[rows, codes]`` to ``[samples]``."""
    return decoder.decode(codes[None], torch.tensor([codes.shape[1]]))[0][0]


def stream(
    decoder: FixedShapeDecoder, codes: Tensor, settings: StreamSettings, *, right_window: int
) -> Iterator[Tensor]:
    """The parts of a stream's sound."""
    frames_per_group = GROUP_SIZE * decoder.frames_per_code
    samples_per_frame = decoder.samples_per_code // decoder.frames_per_code
    for window in windows(settings, codes.shape[1] // GROUP_SIZE):
        first, end = new_frames(
            groups=window.groups,
            spoken=window.spoken,
            index=window.index,
            final=window.final,
            right_context=settings.right_context,
            right_window=right_window,
            frames_per_group=frames_per_group,
        )
        waveform = decode(decoder, codes[:, window.start * GROUP_SIZE : window.end * GROUP_SIZE])
        yield waveform[first * samples_per_frame : end * samples_per_frame]


def errors(parts: list[Tensor], whole: Tensor) -> tuple[float, float]:
    """Relative error of all of the sound, and of what is around the seams."""
    sound = torch.cat(parts)
    at_seams = torch.zeros(len(whole), dtype=torch.bool)
    for seam in torch.tensor([len(part) for part in parts]).cumsum(0)[:-1].tolist():
        at_seams[max(0, seam - SEAM_SAMPLES) : seam + SEAM_SAMPLES] = True
    difference = sound - whole
    return tuple(float(difference[where].norm() / whole[where].norm()) for where in (slice(None), at_seams))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare streamed with one-shot decoding of MiMo-Audio.")
    parser.add_argument("--chunk", type=int, default=3, help="groups of a chunk (default: 3)")
    parser.add_argument("--left-context", type=int, default=40, help="groups before it (default: 40)")
    parser.add_argument("--groups", type=int, default=60, help="groups of the stream (default: 60, which is 9.6 s)")
    parser.add_argument("--decoder-layers", type=int, default=4, help="layers of the decoder (default: 4)")
    parser.add_argument("--plot", type=Path, help="draw the errors into this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the comparison. Returns the exit code."""
    args = parse_args(argv)
    decoder = random_decoder(args.decoder_layers)
    sizes = torch.tensor(decoder.codebook_sizes)[:, None]
    codes = (
        torch.rand(len(sizes), GROUP_SIZE * args.groups, generator=torch.Generator().manual_seed(1)) * sizes
    ).long()
    whole = decode(decoder, codes)
    rows: list[tuple[str, float, float]] = []
    cases = [("nothing waits, as upstream", 0, 0), ("10 frames wait for the next chunk (default)", 0, 10)]
    cases += [(f"right_context_frames: {groups}", groups, 10) for groups in (1, 2, 5, 10)]
    for name, right_context, right_window in tqdm(cases, unit="setting"):
        settings = StreamSettings(chunk=args.chunk, left_context=args.left_context, right_context=right_context)
        rows.append((name, *errors(list(stream(decoder, codes, settings, right_window=right_window)), whole)))
    table = PrettyTable(["setting", "error of all", f"error within {SEAM_SAMPLES} samples of a seam"])
    table.align = "r"
    table.align["setting"] = "l"
    table.add_rows([[name, f"{of_all:.1e}", f"{of_seams:.1e}"] for name, of_all, of_seams in rows])
    print(table)
    if args.plot is not None:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        names = [name for name, *_ in rows]
        axes.plot([of_all for _, of_all, _ in rows], names, "o-", label="all")
        axes.plot([of_seams for *_, of_seams in rows], names, "o-", label="at seams")
        axes.set(xscale="log", xlabel="relative error to one decode of all codes")
        axes.invert_yaxis()
        axes.legend()
        figure.savefig(args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
