# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench token2wav_requests`: several requests in one evaluation, or one solve, of the DiT.

Each request has a voice, codes and noise of its own. The sizes are the 7B model's, the weights random, in float32.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_audio_perf.benchmarks import harness, token2wav
from vllm_omni_audio_perf.benchmarks.harness import Run, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_omni_audio_perf.token2wav import Clip, Sampler

VARIANTS = ("solo", "packed")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench token2wav_requests`."""
    parser = subparsers.add_parser(
        "token2wav_requests",
        help="several requests in one evaluation of the Token2Wav DiT beside one after another",
        description="Measure requests of different lengths in the Token2Wav DiT as the plugin evaluates it: `solo` one "
        "request after another, `packed` all in one batch. Sizes of the 7B model, random weights in float32. Errors "
        "are the largest of a request to the same request alone.",
    )
    parser.add_argument(
        "--requests",
        type=requests,
        default=[300, 700, 1300, 1700],
        metavar="N,N[,N...]",
        help="length of each request in mel frames of 10 ms, positive even numbers (default: 300,700,1300,1700)",
    )
    parser.add_argument(
        "--solve",
        action="store_true",
        help="measure whole solves, from noise to mels (default: one guided evaluation)",
    )
    harness.add_options(parser, VARIANTS, default=VARIANTS)
    harness.add_memory_option(parser)
    parser.set_defaults(run=partial(run, parser))


def requests(text: str) -> list[int]:
    """An argparse type: a comma-separated list of at least two lengths, in the order given."""
    lengths = [int(item) for item in text.split(",") if token2wav.mel_frames(item)]
    if len(lengths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it takes the lengths of at least two requests")
    return lengths


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure and report; see `harness.run`."""
    token2wav.quiet_vllm()
    implementation = token2wav.stock_implementation()
    what = "A solve" if args.solve else "One guided evaluation"
    benchmark = harness.Benchmark(
        name="token2wav_requests",
        title=f"{what} of the Token2Wav DiT for {len(args.requests)} requests, float32",
        build=partial(
            build_variants,
            args.variants,
            implementation,
            args.requests,
            solve=args.solve,
            device=args.device,
            seed=args.seed,
            dit_config=token2wav.DIT_CONFIG,
        ),
        names=args.variants,
        lengths=[sum(args.requests)],
        length_name="mel_frames",
        warm_up_length=token2wav.WARM_UP_FRAMES,
        lengths_option="requests",
    )
    return harness.run(
        benchmark,
        parser,
        args,
        requests=args.requests,
        solve=args.solve,
        no_memory=args.no_memory,
        implementation=implementation,
        dtype="float32",
    )


def build_variants(
    names: Sequence[str],
    implementation: str,
    lengths: Sequence[int],
    *,
    solve: bool = False,
    device: str = "cpu",
    seed: int = 0,
    dit_config: dict[str, Any] | None = None,
) -> list[Variant]:
    """Build one DiT and the variants over it. Each returns an output a request.

    Args:
        names: of the variants, in the order of the result.
        implementation: as from `token2wav.stock_implementation`.
        lengths: of the requests, in mel frames. Prepared for another number than their sum, a variant has a single
            request of that number, to warm up.
        solve: whether to run whole solves; otherwise one guided evaluation, at the start of one.
        device: where the model and its inputs are.
        seed: of the inputs.
        dit_config: overrides of the 7B model's configuration.
    """
    from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler

    model = token2wav.build_token2wav(implementation, device, dit_config=dit_config).code2wav_dit_model
    sampler = Sampler(BlockDiT(model))

    def clip(index: int, frames: int) -> "Clip":
        speaker, reference_mel, codes, mel = token2wav.make_inputs(model, frames, seed + index, device)
        return Clip(codes[0], speaker, reference_mel, mel)

    def prepare(name: str, frames: int) -> Run:
        of_requests = lengths if frames == sum(lengths) else [frames]
        clips = [clip(index, length) for index, length in enumerate(of_requests)]
        batches = [clips] if name == "packed" else [[clip] for clip in clips]
        runs: list[Callable[[], list[Tensor]]]
        if solve:
            runs = [partial(sampler.sample, batch) for batch in batches]
        else:
            runs = [evaluation(sampler, batch) for batch in batches]
        return lambda: [output for run in runs for output in run()]

    return [Variant(name, partial(prepare, name)) for name in names]


def evaluation(sampler: "Sampler", clips: "Sequence[Clip]") -> "Callable[[], list[Tensor]]":
    """One guided evaluation at the first time of a solve, of clips in one batch.

    What a solve computes before it is computed here.

    Returns:
        What computes the velocities ``[frames, mel_dim]``, one a clip.
    """
    import torch

    dit = sampler.dit
    with torch.inference_mode():
        layout = dit.layout([clip.noise.shape[1] for clip in clips], guided=True)
        voices = [dit.voice(clip.speaker, clip.reference_mel) for clip in clips]
        conditions = dit.conditions(layout, voices, [clip.codes for clip in clips], guided=True)
        state = layout.pack([clip.noise[0] for clip in clips])
        modulation = sampler.table.at(0)
    return lambda: layout.unpack(dit.velocity(state, modulation, conditions, layout.groups, sampler.guidance_scale))
