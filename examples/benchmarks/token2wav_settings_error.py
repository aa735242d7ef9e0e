# SPDX-License-Identifier: Apache-2.0
"""What Qwen2.5-Omni's Token2Wav loses and saves with other solvers, fewer points, bfloat16 layers and TF32.

    python examples/benchmarks/token2wav_settings_error.py --frames 240

The network has random weights in the sizes of the 7B model, so the figures compare settings; they are not those of a
trained model. TF32 exists on GPUs alone: here the inputs and weights of each linear layer are rounded to its 10 bits of
mantissa, which is what a GPU multiplies.
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from prettytable import PrettyTable
from torch import Tensor, nn
from tqdm import tqdm
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

from vllm_omni_audio_perf.testing.upstream import build_transformers_token2wav
from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler, cast_linear_layers

EVALUATIONS = {"rk4": 4, "midpoint": 2, "euler": 1}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"dit_dtype": "bfloat16"},
    {"dit_dtype": "tf32"},
    {"num_steps": 8},
    {"num_steps": 7},
    {"num_steps": 5},
    {"solver": "midpoint", "num_steps": 10},
    {"solver": "midpoint", "num_steps": 19},
    {"solver": "euler", "num_steps": 10},
    {"solver": "euler", "num_steps": 19},
]


def to_tf32(tensor: Tensor) -> Tensor:
    """Float32 rounded to the nearest number of 10 bits of mantissa."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def with_tf32(model: nn.Module) -> nn.Module:
    """A copy whose linear layers multiply what TF32 would."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = to_tf32(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: tuple(map(to_tf32, inputs)))
    return model


def random_clip(dit: Any, frames: int) -> Clip:
    """The clip that is solved with all settings."""
    generator = torch.Generator().manual_seed(0)
    return Clip(
        torch.randint(0, dit.config.num_embeds, (frames // dit.repeats,), generator=generator),
        torch.randn(1, dit.config.enc_emb_dim, generator=generator),
        torch.randn(1, 300, dit.mel_dim, generator=generator),
        torch.randn(1, frames, dit.mel_dim, generator=generator),
    )


def rel_error(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||``."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=240, help="mel frames of 10 ms, even (default: 240)")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch (default: torch's own)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures there")
    args = parser.parse_args(arguments)
    if args.frames < 2 or args.frames % 2:
        parser.error(f"--frames is {args.frames}; allowed: an even number of at least 2")
    return args


def main() -> None:
    """Solve with each setting and print the table."""
    args = parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    token2wav: Any = build_transformers_token2wav(Qwen2_5OmniToken2WavConfig())
    dit, bigvgan = token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model
    lower = copy.deepcopy(dit)
    cast_linear_layers(lower, torch.bfloat16)
    networks = {"float32": BlockDiT(dit), "bfloat16": BlockDiT(lower, linear_dtype=torch.bfloat16)}
    networks["tf32"] = BlockDiT(with_tf32(dit))
    clip = random_clip(dit, args.frames)
    rows: list[dict[str, Any]] = []
    reference: tuple[Tensor, Tensor] | None = None
    for given in tqdm(SETTINGS, unit="solve"):
        setting = {"dit_dtype": "float32", "solver": "rk4", "num_steps": 10} | given
        sampler = Sampler(networks[setting["dit_dtype"]], num_steps=setting["num_steps"], solver=setting["solver"])
        start = time.perf_counter()
        (mel,) = sampler.sample([clip])
        seconds = time.perf_counter() - start
        with torch.inference_mode():
            waveform = bigvgan(mel).reshape(-1)
        if reference is None:
            reference = mel, waveform
        rows.append(
            setting
            | {
                "evaluations": EVALUATIONS[setting["solver"]] * (setting["num_steps"] - 1),
                "mel_rel_error": rel_error(mel, reference[0]),
                "waveform_rel_error": rel_error(waveform, reference[1]),
                "seconds": seconds,
            }
        )
    columns = [name for name in rows[0] if name != "seconds"]
    table = PrettyTable([name.replace("_", " ") for name in columns], align="r")
    for row in rows:
        table.add_row([f"{row[name]:.1e}" if name.endswith("error") else row[name] for name in columns])
    print(table.get_string())
    if args.json is not None:
        args.json.write_text(json.dumps({"frames": args.frames, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
