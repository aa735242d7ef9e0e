# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench vocoder`: Qwen2.5-Omni's BigVGAN over a long mel, whole and in pieces.

The sizes are the 7B model's; the weights are random, in float32, and the same for both, which use them in place.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_audio_perf.benchmarks import harness, token2wav
from vllm_omni_audio_perf.benchmarks.harness import Run, Variant
from vllm_omni_audio_perf.options import Token2WavOptions

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("stock", "plugin")
WARM_UP_FRAMES = 8

# Overrides of the vocoder's configuration. transformers' defaults are the real sizes; tests are smaller.
BIGVGAN_CONFIG: dict[str, Any] = {}

# The DiT takes no part.
SMALL_DIT: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 64}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench vocoder`."""
    parser = subparsers.add_parser(
        "vocoder",
        help="Qwen2.5-Omni's BigVGAN over a long mel, whole and in pieces",
        description="Measure Qwen2.5-Omni's BigVGAN at its real sizes, with random weights in float32: `stock` over "
        "the whole mel, as vLLM-Omni calls it; `plugin` in pieces that overlap, as the stage does.",
    )
    parser.add_argument(
        "--mel-frames",
        type=token2wav.mel_frames,
        default=[500, 1500],
        metavar="N[,N...]",
        help="lengths in mel frames of 10 ms, positive even numbers (default: 500,1500)",
    )
    parser.add_argument(
        "--stock-up-to",
        type=harness.positive,
        metavar="N",
        help="leave `stock` out at lengths over N mel frames, where its memory may not be there",
    )
    parser.add_argument(
        "--piece-frames",
        type=harness.positive,
        default=Token2WavOptions.vocoder_frames,
        metavar="N",
        help="longest mel that the plugin runs whole, the option `vocoder_frames` of the stage "
        f"(default: {Token2WavOptions.vocoder_frames})",
    )
    harness.add_options(parser, VARIANTS, default=VARIANTS)
    harness.add_memory_option(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure and report; see `harness.run`."""
    token2wav.quiet_vllm()
    implementation = token2wav.stock_implementation()
    benchmark = harness.Benchmark(
        name="vocoder",
        title="Qwen2.5-Omni's BigVGAN, float32",
        build=partial(
            build_variants,
            args.variants,
            implementation,
            piece_frames=args.piece_frames,
            device=args.device,
            seed=args.seed,
            stock_up_to=args.stock_up_to,
            bigvgan_config=BIGVGAN_CONFIG,
        ),
        names=args.variants,
        lengths=args.mel_frames,
        length_name="mel_frames",
        warm_up_length=WARM_UP_FRAMES,
    )
    return harness.run(
        benchmark,
        parser,
        args,
        mel_frames=args.mel_frames,
        stock_up_to=args.stock_up_to,
        piece_frames=args.piece_frames,
        no_memory=args.no_memory,
        stock_implementation=implementation,
        dtype="float32",
    )


def build_variants(
    names: Sequence[str],
    implementation: str,
    *,
    piece_frames: int,
    device: str = "cpu",
    seed: int = 0,
    stock_up_to: int | None = None,
    bigvgan_config: dict[str, Any] | None = None,
) -> list[Variant]:
    """Build one vocoder and the variants over it. Each returns ``[samples]`` float32 on the CPU.

    Args:
        names: of the variants, in the order of the result.
        implementation: as from `token2wav.stock_implementation`.
        piece_frames: longest mel that `plugin` runs whole.
        device: where the vocoder and its inputs are.
        seed: of the inputs.
        stock_up_to: the longest length of `stock`, in mel frames.
        bigvgan_config: overrides of the real vocoder's configuration.
    """
    import torch

    from vllm_omni_audio_perf.token2wav.vocoder import vocode

    vocoder = token2wav.build_token2wav(
        implementation, device, dit_config=SMALL_DIT, bigvgan_config=bigvgan_config or {}
    ).code2wav_bigvgan_model

    def mel(frames: int) -> "Tensor":
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(1, vocoder.config.mel_dim, frames, generator=generator).to(device)

    def stock(frames: int) -> Run:
        whole = mel(frames)
        return lambda: vocoder(whole).reshape(-1)

    def plugin(frames: int) -> Run:
        return partial(vocode, vocoder, mel(frames), piece_frames=piece_frames)

    prepare = {"stock": stock, "plugin": plugin}
    return [Variant(name, prepare[name], up_to=stock_up_to if name == "stock" else None) for name in names]
