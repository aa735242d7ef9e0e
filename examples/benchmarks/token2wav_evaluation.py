# SPDX-License-Identifier: Apache-2.0
"""One guided evaluation of the real-size Token2Wav DiT on CPU: upstream's dense attention against ours.

    python examples/benchmarks/token2wav_evaluation.py --mel-frames 2000 --threads 2

Weights are random. The two variants are timed in turn in one process, so that both see the same machine; each variant's
extra memory (peak during an evaluation less what the process held before) is taken in a process of its own.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

VARIANTS = ("dense", "block_sparse")


def build() -> dict[str, Callable[[int], "object"]]:
    """One function a variant: evaluates the same DiT on the same inputs of a given number of mel frames."""
    import torch
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

    from vllm_omni_audio_perf.qwen2_5_omni import BlockSparseDiT
    from vllm_omni_audio_perf.testing.upstream import build_vllm_omni_token2wav

    # transformers' defaults are the sizes of Qwen2.5-Omni-7B; a small vocoder, which takes no part.
    config = Qwen2_5OmniToken2WavConfig(bigvgan_config={"upsample_initial_channel": 64})
    upstream = build_vllm_omni_token2wav(config).code2wav_dit_model
    ours = BlockSparseDiT(upstream)
    moment = torch.tensor(0.3)

    def inputs(frames: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        speaker = torch.randn(1, config.dit_config.enc_emb_dim, generator=generator)
        reference_mel = torch.randn(1, 300, config.dit_config.mel_dim, generator=generator)
        codes = torch.randint(0, config.dit_config.num_embeds, (1, frames // upstream.repeats), generator=generator)
        mel = torch.randn(1, frames, config.dit_config.mel_dim, generator=generator)
        return speaker, reference_mel, codes, mel

    def dense(frames: int) -> torch.Tensor:
        speaker, reference_mel, codes, mel = inputs(frames)
        return upstream(
            hidden_states=mel,
            condition_vector=reference_mel,
            speaker_embedding=speaker.unsqueeze(1).expand(1, frames, -1),
            quantized_code=codes,
            time_step=moment,
        )

    def block_sparse(frames: int) -> torch.Tensor:
        speaker, reference_mel, codes, mel = inputs(frames)
        # Includes what a solve computes once and upstream in every evaluation, so that the work is the same.
        return ours.evaluate(mel, moment, ours.conditions(speaker, reference_mel, codes, guided=True))

    return {"dense": dense, "block_sparse": block_sparse}


def process_memory(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


def extra_memory(variant: str, frames: int) -> float:
    """MiB that one evaluation needs at its peak."""
    evaluate = build()[variant]
    evaluate(48)  # one-time costs of the first call: thread pools, kernels
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed must not be reused unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is held now
    before = process_memory("VmRSS")
    evaluate(frames)
    return process_memory("VmHWM") - before


def extra_memory_in_own_process(variant: str, args: argparse.Namespace) -> float:
    """`extra_memory` in a fresh process."""
    command = [sys.executable, __file__, "--mel-frames", str(args.mel_frames), "--threads", str(args.threads)]
    output = subprocess.run([*command, "--memory-of", variant], check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(output.splitlines()[-1])


def main() -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mel-frames", type=int, default=2000, help="length in mel frames of 10 ms (default: 2000)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--pairs", type=int, default=7, help="how often each variant is timed (default: 7)")
    parser.add_argument("--json", type=Path, help="also write the result there")
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    import torch
    from tqdm import trange

    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        if args.memory_of:
            print(extra_memory(args.memory_of, args.mel_frames))
            return 0
        variants = build()
        outputs = {name: evaluate(args.mel_frames) for name, evaluate in variants.items()}  # warms up, too
        difference = float((outputs["dense"] - outputs["block_sparse"]).abs().max())
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for _ in trange(args.pairs, desc=f"{args.mel_frames} frames", unit="pair"):
            for name, evaluate in variants.items():
                start = time.perf_counter()
                evaluate(args.mel_frames)
                seconds[name].append(time.perf_counter() - start)
    memory = {name: extra_memory_in_own_process(name, args) for name in variants}
    ratios = [dense / sparse for dense, sparse in zip(*seconds.values(), strict=True)]
    result = {
        "mel_frames": args.mel_frames,
        "threads": args.threads,
        "pairs": args.pairs,
        "seconds_median": {name: statistics.median(times) for name, times in seconds.items()},
        "speedup_median": statistics.median(ratios),
        "speedup_min_max": [min(ratios), max(ratios)],
        "extra_mib": memory,
        "extra_memory_ratio": memory["block_sparse"] / memory["dense"],
        "max_abs_difference": difference,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
