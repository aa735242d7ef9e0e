# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench token2wav`: one guided evaluation of the Qwen2.5-Omni Token2Wav DiT.

A solve makes 36 of them, and they are nearly all of its time. The sizes are the 7B model's; the weights are random and
the same for all variants. Those in float32 use them in place.
"""

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni_audio_perf.benchmarks import harness
from vllm_omni_audio_perf.benchmarks.harness import Run, Variant
from vllm_omni_audio_perf.benchmarks.report import Ratio

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm_omni_audio_perf.token2wav import BlockDiT
    from vllm_omni_audio_perf.token2wav.layout import Group

VARIANTS = ("stock", "block_sparse", "hoisted", "plugin", "matmul_floor", "plugin_bfloat16")
DEFAULT_VARIANTS = ("stock", "block_sparse", "plugin")
TECHNIQUES = ("stock", "block_sparse", "hoisted", "plugin", "plugin_bfloat16")  # each adds one to those before
FLOOR_PAIRS = 7  # the smallest of fewer ratios is left to chance
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
        "with random weights. `stock` is vLLM-Omni's class, or transformers' where vLLM-Omni is not installed. "
        "`block_sparse` is the same with its attention replaced and nothing else; `hoisted` also leaves out what a "
        "solve of 36 evaluations computes once; `plugin` is what the plugin runs in a solve, which also evaluates in "
        "groups and in place; `plugin_bfloat16` is that with `dit_dtype: bfloat16`. `matmul_floor` runs nothing but "
        "the matrix products of the layers of `plugin`, at its shapes: plugin_over_matmul_floor is the smallest ratio "
        f"of neighbouring runs of the two, of at least {FLOOR_PAIRS} rounds.",
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
    harness.add_options(parser, VARIANTS, default=DEFAULT_VARIANTS)
    harness.add_memory_option(parser)
    parser.add_argument(
        "--waterfall",
        type=Path,
        metavar="FILE.png",
        help="also draw there what each technique brings, at the longest length that all variants are measured at",
    )
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
    check(args)
    quiet_vllm()
    implementation = stock_implementation()
    benchmark = harness.Benchmark(
        name="token2wav",
        title="One guided evaluation of the Qwen2.5-Omni Token2Wav DiT",
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
        about="plugin",
        ratios=ratios(args.variants),
        waterfall=TECHNIQUES,
    )
    return harness.run(
        benchmark,
        parser,
        args,
        mel_frames=args.mel_frames,
        stock_up_to=args.stock_up_to,
        no_memory=args.no_memory,
        stock_implementation=implementation,
        dtype="float32",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse what would give no figure or no picture in the end.

    Raises:
        ValueError: for too few rounds for `matmul_floor`, and for a waterfall of one bar or of no length.
    """
    if "matmul_floor" in args.variants and args.pairs < FLOOR_PAIRS:
        raise ValueError(f"--pairs {args.pairs}: matmul_floor needs at least {FLOOR_PAIRS}")
    if args.waterfall is None:
        return
    if sum(name in TECHNIQUES for name in args.variants) < 2:
        raise ValueError(f"--waterfall needs --variants with at least two of {', '.join(TECHNIQUES)}")
    if "stock" in args.variants and args.stock_up_to is not None and args.stock_up_to < min(args.mel_frames):
        raise ValueError(f"--waterfall: no length is within --stock-up-to {args.stock_up_to}")


def quiet_vllm() -> None:
    """Keep vLLM's log short and away from stdout, which is for the table. To be called before it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def ratios(names: Sequence[str]) -> list[Ratio]:
    """What is compared beside each variant and the baseline: each technique with the one before, plugin with the floor.

    Args:
        names: of the variants, the baseline first.
    """
    bars = [name for name in TECHNIQUES if name in names]
    pairs = dict.fromkeys([*pairwise(bars), ("block_sparse", "plugin")])
    return [
        *(
            Ratio(f"{name}_speedup_over_{before}", f"{name}: speed-up over {before}", before, name)
            for before, name in pairs
            if before != names[0]  # stands there as its speed-up already
        ),
        Ratio(
            "plugin_over_matmul_floor",
            "plugin: times matmul_floor's",
            "plugin",
            "matmul_floor",
            smallest=True,
            least_pairs=FLOOR_PAIRS,
        ),
    ]


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

    from vllm_omni_audio_perf.benchmarks.block_sparse_dit import BlockSparseDiT
    from vllm_omni_audio_perf.token2wav import BlockDiT

    moment = torch.tensor(0.3, device=device)

    @cache  # built by the first variant that asks for it, and only then
    def theirs() -> Any:
        return build_token2wav(implementation, device, dit_config=dit_config).code2wav_dit_model

    @cache
    def theirs_bfloat16() -> Any:
        return build_token2wav(
            implementation, device, dit_config=dit_config, linear_dtype=torch.bfloat16
        ).code2wav_dit_model

    def stock(frames: int) -> Run:
        dit = theirs()
        speaker, reference_mel, codes, mel = make_inputs(dit, frames, seed, device)
        return lambda: dit(
            hidden_states=mel,
            condition_vector=reference_mel,
            speaker_embedding=speaker.unsqueeze(1).expand(1, frames, -1),
            quantized_code=codes,
            time_step=moment,
        )

    def block_sparse(frames: int) -> Run:
        dit = BlockSparseDiT(theirs())
        inputs = make_inputs(dit.model, frames, seed, device)
        return lambda: dit.evaluate(*inputs, moment)

    def hoisted(frames: int) -> Run:
        dit = BlockSparseDiT(theirs())
        speaker, reference_mel, codes, mel = make_inputs(dit.model, frames, seed, device)
        with torch.inference_mode():
            shared = dit.hoist(speaker, reference_mel, codes, moment)
        return lambda: dit.evaluate_hoisted(mel, shared)

    def plugin(frames: int) -> Run:
        return evaluation(BlockDiT(theirs()), frames)

    def plugin_bfloat16(frames: int) -> Run:
        return evaluation(BlockDiT(theirs_bfloat16(), linear_dtype=torch.bfloat16), frames)

    def evaluation(dit: "BlockDiT", frames: int) -> Run:
        speaker, reference_mel, codes, mel = make_inputs(dit.model, frames, seed, device)
        with torch.inference_mode():
            layout = dit.layout([frames], guided=True)
            modulation = dit.modulation_table(moment.reshape(1)).at(0)
            conditions = dit.conditions(layout, [dit.voice(speaker, reference_mel)], [codes[0]], guided=True)
            state = layout.pack([mel[0]])

        def evaluate() -> "Tensor":
            rows = dit.evaluate(state, modulation, conditions, layout.groups)
            return rows.unflatten(0, (2, -1)).flatten(1, 2)[:, :frames]

        return evaluate

    def matmul_floor(frames: int) -> Run:
        dit = BlockDiT(theirs())
        return _matrix_products(dit, dit.layout([frames], guided=True).groups, seed, device)

    prepare: dict[str, Callable[[int], Run]] = {
        "stock": stock,
        "block_sparse": block_sparse,
        "hoisted": hoisted,
        "plugin": plugin,
        "plugin_bfloat16": plugin_bfloat16,
        "matmul_floor": matmul_floor,
    }
    return [Variant(name, prepare[name], up_to=stock_up_to if name == "stock" else None) for name in names]


def _matrix_products(dit: "BlockDiT", groups: "Sequence[Group]", seed: int, device: str) -> Run:
    """A run of the linear modules of a DiT's layers, each on as many frames as an evaluation of these groups has.

    The results go nowhere, so that there is nothing to compare.
    """
    import torch

    blocks = groups[-1].stop
    largest = max(group.stop - group.start for group in groups)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(blocks, dit.block_size, dit.model.hidden_size, generator=generator).to(device)
    attended = torch.randn(largest, dit.block_size, dit.layers[0].attn.inner_dim, generator=generator).to(device)

    def multiply() -> None:
        for layer in dit.layers:
            attention, (into, _, _, out_of) = layer.attn, layer.ff.ff
            fused = hasattr(attention, "qkv_proj")
            projections = [attention.qkv_proj] if fused else [attention.to_q, attention.to_k, attention.to_v]
            for group in groups:
                part = hidden[group.start : group.stop]
                for projection in projections:
                    projection(part)
                attention.to_out[0](attended[: part.shape[0]])
                out_of(into(part))

    return multiply


def build_token2wav(
    implementation: str,
    device: str,
    *,
    dit_config: dict[str, Any] | None = None,
    bigvgan_config: dict[str, Any] | None = None,
    linear_dtype: "torch.dtype | None" = None,
) -> Any:
    """Upstream's Token2Wav with random weights, float32.

    Args:
        implementation: as from `stock_implementation`.
        device: where it is.
        dit_config: overrides of the 7B model's configuration.
        bigvgan_config: the same of the vocoder; None for a small one, where it takes no part.
        linear_dtype: of the DiT's linear layers, if not float32.
    """
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

    from vllm_omni_audio_perf.testing import upstream
    from vllm_omni_audio_perf.token2wav import cast_linear_layers

    def cast(token2wav: Any) -> None:
        if linear_dtype is not None:
            cast_linear_layers(token2wav.code2wav_dit_model, linear_dtype)

    if bigvgan_config is None:
        bigvgan_config = {"upsample_initial_channel": 64}
    config = Qwen2_5OmniToken2WavConfig(dit_config=dict(dit_config or {}), bigvgan_config=bigvgan_config)
    token2wav: Any
    if implementation == "vllm_omni":
        token2wav = upstream.build_vllm_omni_token2wav(config, prepare=cast)  # vLLM packs the weights then
    else:
        token2wav = upstream.build_transformers_token2wav(config)
        cast(token2wav)
    return token2wav.to(device)


def make_inputs(dit: Any, frames: int, seed: int, device: str) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
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
    return speaker.to(device), reference_mel.to(device), codes.to(device), mel.to(device)
