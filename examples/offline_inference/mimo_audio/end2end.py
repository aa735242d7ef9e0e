# SPDX-License-Identifier: Apache-2.0
"""MiMo-Audio offline: a prompt in, text and a WAV file out, through vLLM-Omni's talker and code2wav.

    export MIMO_AUDIO_TOKENIZER_PATH=/models/MiMo-Audio-Tokenizer
    python examples/offline_inference/mimo_audio/end2end.py --text "Hello." --model XiaomiMiMo/MiMo-Audio-7B-Instruct
    python examples/offline_inference/mimo_audio/end2end.py --query-type audio_trancribing_sft --audio-path question.wav

Without `--model` it generates a small random checkpoint with its audio tokenizer, which answers with random characters
and noise at the level of speech: enough to see the whole pipeline run, on a CPU too. Without the path of a recording it
takes those in examples/media. `queries.py` beside this file makes the prompts.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from queries import QUERY_TYPES, SAMPLE_RATE, PromptError, Request, check_earlier_answer

from vllm_omni_audio_perf.stage_configs_index import stage_config_path

STAGES = ("talker", "code2wav")
TOKENIZER_VARIABLE = "MIMO_AUDIO_TOKENIZER_PATH"
LARGEST_SEED = 2**63 - 1


class TokenizerError(Exception):
    """There is no audio tokenizer; the message says what to do."""


def small_checkpoint() -> Path:
    """The generated checkpoint in the user's cache folder, made on first use."""
    from vllm_omni_audio_perf.testing.checkpoint_cache import cached_mimo_audio_checkpoint

    path = cached_mimo_audio_checkpoint()
    print(f"No --model given: using the generated random checkpoint {path}. Its answers mean nothing.", flush=True)
    return path


def audio_tokenizer(model: str) -> str:
    """The folder of the audio tokenizer: the one in the environment, or else the one within the model's folder.

    Raises:
        TokenizerError: there is none.
    """
    given = os.environ.get(TOKENIZER_VARIABLE)
    if given:
        if not Path(given).is_dir():
            # vLLM-Omni takes no name of a repository here.
            raise TokenizerError(f"{TOKENIZER_VARIABLE} is {given}, but there is no such folder")
        return given
    within = Path(model) / "audio_tokenizer"
    if not within.is_dir():
        raise TokenizerError(
            f"{TOKENIZER_VARIABLE} is not set, and there is no folder {within}. MiMo-Audio needs its audio tokenizer: "
            f"`export {TOKENIZER_VARIABLE}=FOLDER` with a copy of XiaomiMiMo/MiMo-Audio-Tokenizer"
        )
    return str(within.absolute())


def make_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`--num-prompts` prompts of each query type.

    Raises:
        PromptError: a file cannot be read.
    """
    request = Request(args.text, args.instruct, tuple(args.audio_path))
    return [
        dict(prompt)
        for prompt in [
            query_type.make(request) | {"modalities": ["text", "audio"] if query_type.speaks else ["text"]}
            for query_type in (QUERY_TYPES[name] for name in args.query_type)
        ]
        for _ in range(args.num_prompts)
    ]


def check_prompts(prompts: list[dict[str, Any]], model: str) -> None:
    """Refuse what would stop the engine.

    Raises:
        PromptError: the first such prompt's fault.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for prompt in prompts:
        check_earlier_answer(prompt, lambda text: len(tokenizer(text).input_ids))


def sampling_params(args: argparse.Namespace, defaults: list[Any]) -> list[Any]:
    """The stage config's sampling parameters, with the command line's for the talker."""
    talker, *others = defaults
    changes = {"seed": args.seed, "max_tokens": args.max_tokens}
    talker = talker.clone()
    for name, value in changes.items():
        if value is not None:
            setattr(talker, name, value)
    return [talker, *others]


def save(outputs: list[Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write each request's text and waveform, and return a row of figures for each, in the order of the prompts."""
    import soundfile
    import torch

    rows: dict[int, dict[str, Any]] = {}
    for output in outputs:
        index = int(output.request_id.split("_")[0])
        query_type = args.query_type[index // args.num_prompts]
        path = args.output_dir / query_type / output.request_id
        path.parent.mkdir(parents=True, exist_ok=True)
        row = rows.setdefault(
            index, {"query type": query_type, "text": "", "wav": None, "sound": torch.zeros(0), "path": path}
        )
        if output.final_output_type == "text":
            row["text"] = output.outputs[0].text
            path.with_suffix(".txt").write_text(row["text"] + "\n", encoding="utf-8")
        elif (part := output.multimodal_output.get("audio")) is not None:
            # Streaming or not, there is one tensor here; where an output kind is asked for that hands it out in parts,
            # they come in order.
            row["sound"] = torch.cat([row["sound"], part.float().cpu().reshape(-1)])
        metrics = output.metrics.get("stage_metrics", {}) if isinstance(output.metrics, dict) else {}
        for stage, figures in metrics.items():
            row[STAGES[int(stage)]] = figures["stage_gen_time_ms"] / 1000
    for row in rows.values():
        row["audio_s"] = len(row["sound"]) / SAMPLE_RATE
        if row["audio_s"]:
            row["wav"] = row["path"].with_suffix(".wav")
            soundfile.write(row["wav"], row["sound"].numpy(), SAMPLE_RATE)
    return [row for _, row in sorted(rows.items())]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table. Times include queueing; with a streaming stage config code2wav's include waiting for codes.

    vLLM-Omni 0.30.0 now and then reports no time for a stage, which is then left out.
    """
    from prettytable import PrettyTable

    out = PrettyTable(["query type", "text", "WAV", "audio s", *(f"{stage} s" for stage in STAGES)])
    out.align = "r"
    out.align["query type"] = out.align["text"] = out.align["WAV"] = "l"
    out.max_width["text"] = 40
    for row in rows:
        text = row["text"] if len(row["text"]) <= 200 else row["text"][:200] + "..."
        figures = (row["audio_s"], *(row.get(stage) for stage in STAGES))
        cells = ("-" if figure is None else f"{figure:.2f}" for figure in figures)
        out.add_row([row["query type"], text, row["wav"] or "-", *cells])
    return out.get_string()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; options may be spelt with `-` or `_`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="Run MiMo-Audio offline with the audio-perf code2wav stage.")
    parser.add_argument(
        "--model",
        "--model-name",
        "-m",
        dest="model",
        help="checkpoint folder or name; by default a small random one is generated",
    )
    parser.add_argument(
        "--stage-config",
        "--stage-configs-path",
        "--deploy-config",
        dest="stage_config",
        type=Path,
        default=stage_config_path("mimo_audio"),
        help="stage-config YAML (default: the plugin's mimo_audio.yaml)",
    )
    parser.add_argument(
        "--query-type",
        "-q",
        type=lambda value: value.split(","),
        default=["tts_sft"],
        help=f"kind of prompt, or several, comma-separated: {', '.join(QUERY_TYPES)} (default: tts_sft)",
    )
    parser.add_argument(
        "--text",
        "-t",
        help="what to say, what to ask about the recording, the last turn of the text dialogue, or what the assistant "
        "said earlier in the other dialogues",
    )
    parser.add_argument("--instruct", help="how to speak, for tts_sft_with_instruct")
    parser.add_argument(
        "--audio-path",
        "-a",
        type=Path,
        action="append",
        default=[],
        help="your own recording; several times for the dialogues: the voice to speak with (spoken dialogue only), the "
        "first question, the answer to it (spoken dialogue only), the second question",
    )
    parser.add_argument("--seed", type=int, help="seed of the talker's sampling (default: the stage config's)")
    parser.add_argument(
        "--max-tokens", type=int, help="most tokens and groups of codes of an answer (default: the stage config's)"
    )
    parser.add_argument(
        "--num-prompts", type=int, default=1, help="how often to send the prompt of each query type (default: 1)"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("output_audio"), help="default: output_audio")
    parser.add_argument(
        "--log-stats", "--enable-stats", action="store_true", help="log vLLM-Omni's statistics of every stage"
    )
    args = parser.parse_args(argv)
    for option in ("num_prompts", "max_tokens"):
        if (number := getattr(args, option)) is not None and number < 1:
            parser.error(f"--{option.replace('_', '-')} is {number}; at least 1 is needed")
    if unknown := [name for name in args.query_type if name not in QUERY_TYPES]:
        parser.error(f"--query-type: {', '.join(unknown)} is unknown; allowed: {', '.join(QUERY_TYPES)}")
    if args.seed is not None and not 0 <= args.seed <= LARGEST_SEED:
        parser.error(f"--seed is {args.seed}; allowed: 0 to {LARGEST_SEED}")
    if not args.stage_config.is_file():
        parser.error(f"--stage-config: there is no file {args.stage_config}")
    for option in ("text", "instruct"):
        if (words := getattr(args, option)) is not None and not words.strip():
            parser.error(f"--{option} is empty")
    types = ",".join(args.query_type)
    if args.instruct is not None and "tts_sft_with_instruct" not in args.query_type:
        parser.error(f"--instruct has no use with --query-type {types}")
    most = max(QUERY_TYPES[name].recordings for name in args.query_type)
    if len(args.audio_path) > most:
        if most == 0:
            parser.error(f"--audio-path has no use with --query-type {types}")
        parser.error(f"--audio-path is given {len(args.audio_path)} times; --query-type {types} takes at most {most}")
    for path in args.audio_path:
        if not path.is_file():
            parser.error(f"--audio-path: there is no file {path}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the example. Returns the exit code."""
    args = parse_args(argv)
    try:
        prompts = make_prompts(args)
        model = args.model or str(small_checkpoint())
        # Stage processes read it from here.
        os.environ[TOKENIZER_VARIABLE] = audio_tokenizer(model)
        if "spoken_dialogue_sft_multiturn" in args.query_type:
            check_prompts(prompts, model)
    except (PromptError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 2
    args.output_dir.mkdir(parents=True, exist_ok=True)

    from vllm_omni.entrypoints.omni import Omni

    import vllm_omni_audio_perf

    vllm_omni_audio_perf.register()
    print("Starting the two stages. This takes minutes; on a CPU two to three.", flush=True)
    started = time.perf_counter()
    omni = Omni(model=model, deploy_config=str(args.stage_config), log_stats=args.log_stats)
    print(f"Ready after {time.perf_counter() - started:.0f} s.", flush=True)
    try:
        rows = save(omni.generate(prompts, sampling_params(args, omni.default_sampling_params_list)), args)
    finally:
        omni.close()
    print(table(rows), flush=True)
    silent = sum(row["audio_s"] == 0 and QUERY_TYPES[row["query type"]].speaks for row in rows)
    if silent or len(rows) < len(prompts):
        print(f"{len(prompts) - len(rows)} prompts without an answer, {silent} answers without sound", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
