# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni offline: a prompt in, text and a WAV file out, through vLLM-Omni's thinker, talker and code2wav.

    python examples/offline_inference/qwen2_5_omni/end2end.py --text "Tell me a story." --model Qwen/Qwen2.5-Omni-7B
    python examples/offline_inference/qwen2_5_omni/end2end.py --query-type use_audio --audio-path question.wav

Without `--model` it generates a small random checkpoint, which answers with random characters and noise at the level of
speech: enough to see the whole pipeline run, on a CPU too. Without the path of a recording, picture or video it takes
those in examples/media. `queries.py` beside this file makes the prompts.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from queries import QUERY_TYPES, Media, MediaError

from vllm_omni_audio_perf.qwen2_5_omni.request_settings import RequestError, checked_voice
from vllm_omni_audio_perf.qwen2_5_omni.speaker_file import voice_names
from vllm_omni_audio_perf.stage_configs_index import stage_config_path

SAMPLE_RATE = 24_000
MODALITIES = ("text", "audio")
STAGES = ("thinker", "talker", "code2wav")
LARGEST_SEED = 2**63 - 1


def small_checkpoint() -> Path:
    """The generated checkpoint in the user's cache folder, made on first use."""
    from vllm_omni_audio_perf.testing.checkpoint_cache import cached_qwen2_5_omni_checkpoint

    path = cached_qwen2_5_omni_checkpoint()
    print(f"No --model given: using the generated random checkpoint {path}. Its answers mean nothing.", flush=True)
    return path


def make_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`--num-prompts` prompts of each query type.

    Raises:
        MediaError: a file cannot be read.
    """
    given = {"image": args.image_path, "video": args.video_path}
    given |= dict(zip(("audio", "second_audio"), args.audio_path, strict=False))
    media = Media(
        **{name: path for name, path in given.items() if path is not None},
        num_frames=args.num_frames,
        sampling_rate=args.sampling_rate,
    )
    options: dict[str, Any] = {"modalities": args.modalities}
    # Read by the plugin's stages; stock ones take no notice.
    voice = {"speaker": args.speaker, "seed": args.seed}
    if information := {name: [value] for name, value in voice.items() if value is not None}:
        options["additional_information"] = information
    return [
        prompt | options
        for prompt in [QUERY_TYPES[name].make(media, args.text) for name in args.query_type]
        for _ in range(args.num_prompts)
    ]


def save(outputs: list[Any], folder: Path) -> dict[int, dict[str, Any]]:
    """Write each request's text and waveform, and return a row of figures for each, by the index of its prompt."""
    import soundfile

    rows: dict[int, dict[str, Any]] = {}
    for output in outputs:
        row = rows.setdefault(int(output.request_id.split("_")[0]), {"text": "", "wav": None, "audio_s": 0.0})
        if output.final_output_type == "text":
            row["text"] = output.outputs[0].text
            (folder / f"{output.request_id}.txt").write_text(row["text"] + "\n", encoding="utf-8")
        elif output.final_output_type == "audio":
            waveform = output.multimodal_output["audio"].float().cpu().numpy()
            row["wav"] = folder / f"{output.request_id}.wav"
            row["audio_s"] = len(waveform) / SAMPLE_RATE
            soundfile.write(row["wav"], waveform, SAMPLE_RATE)
        metrics = output.metrics.get("stage_metrics", {}) if isinstance(output.metrics, dict) else {}
        for stage, figures in metrics.items():
            row[STAGES[int(stage)]] = figures["stage_gen_time_ms"] / 1000
    return dict(sorted(rows.items()))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table. RTF is the time of all stages over the duration of the audio; times include queueing.

    vLLM-Omni 0.30.0 now and then reports no time for a stage, which is then left out, as is what depends on it.
    """
    from prettytable import PrettyTable

    out = PrettyTable(["text", "WAV", "audio s", *(f"{stage} s" for stage in STAGES), "RTF", "code2wav RTF"])
    out.align = "r"
    out.align["text"] = out.align["WAV"] = "l"
    out.max_width["text"] = 40
    for row in rows:
        text = row["text"] if len(row["text"]) <= 200 else row["text"][:200] + "..."
        times = [row.get(stage) for stage in STAGES]
        total = None if None in times else sum(times)
        rtfs = [seconds / row["audio_s"] if seconds and row["audio_s"] else None for seconds in (total, times[-1])]
        figures = ("-" if figure is None else f"{figure:.2f}" for figure in (row["audio_s"], *times, *rtfs))
        out.add_row([text, row["wav"] or "-", *figures])
    if len({row.get("query type") for row in rows}) > 1:
        out.add_column("query type", [row["query type"] for row in rows], align="l")
    return out.get_string()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; options may be spelt with `-` or `_`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="Run Qwen2.5-Omni offline with the audio-perf code2wav stage.")
    parser.add_argument("--model", help="checkpoint folder or name; by default a small random one is generated")
    parser.add_argument(
        "--stage-config",
        "--stage-configs-path",
        "--deploy-config",
        dest="stage_config",
        type=Path,
        default=stage_config_path("qwen2_5_omni"),
        help="stage-config YAML (default: the plugin's qwen2_5_omni.yaml)",
    )
    parser.add_argument(
        "--query-type",
        "-q",
        type=lambda value: value.split(","),
        default=["text"],
        help=f"kind of prompt, or several, comma-separated: {', '.join(QUERY_TYPES)} (default: text)",
    )
    parser.add_argument("--text", help="your own question")
    parser.add_argument(
        "--audio-path",
        "-a",
        type=Path,
        action="append",
        default=[],
        help="your own recording; twice for both of use_multi_audios",
    )
    parser.add_argument("--image-path", "-i", type=Path, help="your own picture")
    parser.add_argument("--video-path", "-v", type=Path, help="your own video")
    parser.add_argument(
        "--num-frames", type=int, default=16, help="how many frames of a video to use at most (default: 16)"
    )
    parser.add_argument(
        "--sampling-rate", type=int, default=16_000, help="rate in Hz at which sound is loaded (default: 16000)"
    )
    parser.add_argument("--speaker", help="voice of the answer")
    parser.add_argument("--seed", type=int, help="seed of the noise that code2wav turns into sound")
    parser.add_argument(
        "--num-prompts", type=int, default=1, help="how often to send the prompt of each query type (default: 1)"
    )
    parser.add_argument(
        "--modalities",
        type=lambda value: value.split(","),
        default=list(MODALITIES),
        help="comma-separated outputs to produce (default: text,audio)",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("output_audio"), help="default: output_audio")
    parser.add_argument("--log-stats", action="store_true", help="log vLLM-Omni's statistics of every stage")
    args = parser.parse_args(argv)
    for option in ("num_prompts", "num_frames", "sampling_rate"):
        if (number := getattr(args, option)) < 1:
            parser.error(f"--{option.replace('_', '-')} is {number}; at least 1 is needed")
    if unknown := [name for name in args.query_type if name not in QUERY_TYPES]:
        parser.error(f"--query-type: {', '.join(unknown)} is unknown; allowed: {', '.join(QUERY_TYPES)}")
    if unknown := [name for name in args.modalities if name not in MODALITIES]:
        parser.error(f"--modalities: {', '.join(unknown)} is unknown; allowed: {', '.join(MODALITIES)}")
    if args.speaker is not None and not args.speaker.strip():
        parser.error("--speaker is empty")
    if args.seed is not None and not 0 <= args.seed <= LARGEST_SEED:
        parser.error(f"--seed is {args.seed}; allowed: 0 to {LARGEST_SEED}")
    if not args.stage_config.is_file():
        parser.error(f"--stage-config: there is no file {args.stage_config}")
    types = ",".join(args.query_type)
    media = {"--audio-path": args.audio_path, "--image-path": [args.image_path], "--video-path": [args.video_path]}
    for option, paths in media.items():
        for path in filter(None, paths):
            if not any(option in QUERY_TYPES[name].reads for name in args.query_type):
                parser.error(f"{option} has no use with --query-type {types}")
            if not path.is_file():
                parser.error(f"{option}: there is no file {path}")
    if len(args.audio_path) > (most := 2 if "use_multi_audios" in args.query_type else 1):
        parser.error(f"--audio-path is given {len(args.audio_path)} times; --query-type {types} takes at most {most}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the example. Returns the exit code."""
    args = parse_args(argv)
    try:
        prompts = make_prompts(args)
    except MediaError as error:
        print(error, file=sys.stderr)
        return 2
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model = args.model or str(small_checkpoint())
    try:
        checked_voice(args.speaker, voice_names(model))
    except RequestError as error:
        print(f"--speaker: {error}", file=sys.stderr)
        return 2

    from vllm_omni.entrypoints.omni import Omni

    import vllm_omni_audio_perf

    vllm_omni_audio_perf.register()
    print("Starting the three stages. This takes minutes; on a CPU two to four.", flush=True)
    started = time.perf_counter()
    omni = Omni(model=model, deploy_config=str(args.stage_config), log_stats=args.log_stats)
    print(f"Ready after {time.perf_counter() - started:.0f} s.", flush=True)
    try:
        rows = save(omni.generate(prompts), args.output_dir)
    finally:
        omni.close()
    for index, row in rows.items():
        row["query type"] = args.query_type[index // args.num_prompts]
    print(table(list(rows.values())), flush=True)
    silent = sum(row["audio_s"] == 0 for row in rows.values()) if "audio" in args.modalities else 0
    if silent or len(rows) < len(prompts):
        print(f"{len(prompts) - len(rows)} prompts without an answer, {silent} answers without sound", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
