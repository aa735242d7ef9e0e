# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench token2wav`: one guided evaluation of the Qwen2.5-Omni Token2Wav DiT.

A solve makes 36 of them, and they are nearly all of its time. The sizes are the 7B model's; the weights are random, in
float32, and the same for all variants, which use them in place.
"""

import argparse
import importlib.util
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_audio_perf.benchmarks import harness
from vllm_omni_audio_perf.benchmarks.harness import Run, Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

VARIANTS = ("stock", "plugin_hoisted", "plugin")
FRAMES_PER_CODE = 2
REFERENCE_FRAMES = 300  # of the reference voice, 3 s
WARM_UP_FRAMES = 48

# Overrides of the DiT's configuration. transformers' defaults are the sizes of Qwen2.5-Omni-7B; tests are smaller.
DIT_CONFIG: dict[str, Any] = {}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench token2wav`."""
    parser = subparsers.add_parser(
        "token2wav",
        help="one guided evaluation of the Qwen2.5-Omni Token2Wav DiT",
        description="Measure one guided evaluation of the Qwen2.5-Omni Token2Wav DiT at the sizes of the 7B model, "
        "with random weights in float32. `stock` is vLLM-Omni's class, or transformers' where vLLM-Omni is not "
        "installed; `plugin` is block-sparse and does the same work; `plugin_hoisted` leaves out what a solve of 36 "
        "evaluations computes once.",
    )
    parser.add_argument(
        "--mel-frames",
        type=mel_frames,
        default=[500, 1000, 2000],
        metavar="N[,N...]",
        help="lengths in mel frames of 10 ms, positive even numbers (default: 500,1000,2000)",
    )
    parser.add_argument(
        "--stock-up-to",
        type=harness.positive,
        metavar="N",
        help="leave `stock` out at lengths over N mel frames; at 8000 it takes minutes and over 10 GiB",
    )
    harness.add_options(parser, VARIANTS, default=("stock", "plugin"))
    parser.set_defaults(run=partial(run, parser))


def mel_frames(text: str) -> list[int]:
    """An argparse type: a comma-separated list of lengths, returned ascending and each once."""
    for item in text.split(","):
        if not item.isdecimal() or int(item) < 1 or int(item) % FRAMES_PER_CODE:
            raise argparse.ArgumentTypeError(
                f"{item!r} is not allowed; a length is a positive even number of mel frames ({FRAMES_PER_CODE} a code)"
            )
    return sorted({int(item) for item in text.split(",")})


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure and report; see `harness.run`."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the table
    implementation = stock_implementation()
    benchmark = harness.Benchmark(
        name="token2wav",
        title="One guided evaluation of the Qwen2.5-Omni Token2Wav DiT, float32",
        build=partial(
            build_variants,
            args.variants,
            implementation,
            device=args.device,
            seed=args.seed,
            stock_up_to=args.stock_up_to,
            dit_config=DIT_CONFIG,
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
        stock_implementation=implementation,
        dtype="float32",
    )


def stock_implementation() -> str:
    """Whose class `stock` is, and whose parameters all variants use: "vllm_omni" where it can run."""
    installed = all(importlib.util.find_spec(module) is not None for module in ("vllm", "vllm_omni"))
    return "vllm_omni" if installed else "transformers"


def build_variants(
    names: Sequence[str],
    implementation: str,
    *,
    device: str = "cpu",
    seed: int = 0,
    stock_up_to: int | None = None,
    dit_config: dict[str, Any] | None = None,
) -> list[Variant]:
    """Build one DiT and the variants over its parameters.

    Args:
        names: of the variants, in the order of the result.
        implementation: as from `stock_implementation`.
        device: where the model and its inputs are.
        seed: of the inputs.
        stock_up_to: the longest length of `stock`, in mel frames.
        dit_config: overrides of the 7B model's configuration.
    """
    import torch

    from vllm_omni_audio_perf.qwen2_5_omni import BlockSparseDiT

    theirs: Any = _build_dit(implementation, dit_config or {}, device)
    ours = BlockSparseDiT(theirs)
    moment = torch.tensor(0.3, device=device)

    def stock(frames: int) -> Run:
        speaker, reference_mel, codes, mel = _inputs(theirs, frames, seed, device)
        return lambda: theirs(
            hidden_states=mel,
            condition_vector=reference_mel,
            speaker_embedding=speaker.unsqueeze(1).expand(1, frames, -1),
            quantized_code=codes,
            time_step=moment,
        )

    def plugin(frames: int) -> Run:
        *voice_and_codes, mel = _inputs(theirs, frames, seed, device)
        return lambda: ours.evaluate(mel, moment, ours.conditions(*voice_and_codes, guided=True))

    def plugin_hoisted(frames: int) -> Run:
        *voice_and_codes, mel = _inputs(theirs, frames, seed, device)
        with torch.inference_mode():
            conditions = ours.conditions(*voice_and_codes, guided=True)
        return lambda: ours.evaluate(mel, moment, conditions)

    prepare = {"stock": stock, "plugin_hoisted": plugin_hoisted, "plugin": plugin}
    return [Variant(name, prepare[name], up_to=stock_up_to if name == "stock" else None) for name in names]


def _build_dit(implementation: str, dit_config: dict[str, Any], device: str) -> "nn.Module":
    """Upstream's DiT with random weights, float32."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

    from vllm_omni_audio_perf.testing import upstream

    # A small vocoder, which takes no part.
    config = Qwen2_5OmniToken2WavConfig(dit_config=dit_config, bigvgan_config={"upsample_initial_channel": 64})
    if implementation == "vllm_omni":
        token2wav: Any = upstream.build_vllm_omni_token2wav(config)
    else:
        token2wav = upstream.build_transformers_token2wav(config)
    return token2wav.code2wav_dit_model.to(device)


def _inputs(dit: Any, frames: int, seed: int, device: str) -> "tuple[torch.Tensor, ...]":
    """Speaker, reference mel, codes and noised mel, the same for every variant.

    Shapes: ``[1, enc_emb_dim]``, ``[1, 300, mel_dim]``, ``[1, frames / 2]`` int64 and ``[1, frames, mel_dim]``.
    """
    import torch

    config = dit.config
    generator = torch.Generator().manual_seed(seed)
    speaker = torch.randn(1, config.enc_emb_dim, generator=generator)
    reference_mel = torch.randn(1, REFERENCE_FRAMES, config.mel_dim, generator=generator)
    codes = torch.randint(0, config.num_embeds, (1, frames // dit.repeats), generator=generator)
    mel = torch.randn(1, frames, config.mel_dim, generator=generator)
    return tuple(tensor.to(device) for tensor in (speaker, reference_mel, codes, mel))
