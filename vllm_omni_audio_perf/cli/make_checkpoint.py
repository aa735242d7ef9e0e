# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf make-checkpoint`: write a small random checkpoint that runs like a real one."""

import argparse
import importlib
import sys
from pathlib import Path

from tqdm import tqdm

# Model names, each with the module of `vllm_omni_audio_perf.testing` that makes it.
_MODELS = {"mimo_audio": "mimo_audio_checkpoint", "qwen2_5_omni": "qwen2_5_omni_checkpoint"}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `make-checkpoint` subcommand."""
    parser = subparsers.add_parser(
        "make-checkpoint",
        help="write a random checkpoint for tests and trials",
        description="Write a random checkpoint with the files, weight names and vocabularies of the real model. It "
        "needs no download, answers with printable text and makes sound at the level of speech; all of it is noise.",
    )
    parser.add_argument("model", metavar="MODEL", choices=sorted(_MODELS), help=f"one of: {', '.join(sorted(_MODELS))}")
    parser.add_argument(
        "dir", metavar="DIR", type=Path, help="folder to write; an earlier random checkpoint is replaced"
    )
    parser.add_argument(
        "--token2wav",
        choices=["tiny", "real"],
        help="size of the DiT and the vocoder of qwen2_5_omni: tiny (95 MB in all), or as in the real model (1.9 GB) "
        "(default: tiny)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, with a progress bar on stderr, and print its folder; on stderr, what it needs to run.

    Raises:
        ValueError: an option that the model does not have.
    """
    if args.token2wav is not None and args.model != "qwen2_5_omni":
        raise ValueError(f"--token2wav is an option of qwen2_5_omni; {args.model} does not have it")
    options = {} if args.token2wav is None else {"token2wav": args.token2wav}
    module = importlib.import_module(f"vllm_omni_audio_perf.testing.{_MODELS[args.model]}")  # torch: takes seconds
    with tqdm(total=len(module.STEPS), unit="step") as bar:

        def show(step: str) -> None:
            bar.set_description(step, refresh=False)
            bar.update(module.STEPS.index(step) - bar.n)
            bar.refresh()

        path = module.make_checkpoint(args.dir, seed=args.seed, progress=show, **options)
        bar.update(len(module.STEPS) - bar.n)
    print(path)
    if hasattr(module, "usage"):
        print(f"Before use: {module.usage(path)}", file=sys.stderr)
    return 0
