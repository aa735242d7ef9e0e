# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni offline: a prompt in, text and a WAV file out, through vLLM-Omni's thinker, talker and code2wav.

    python examples/offline_inference/qwen2_5_omni/end2end.py --text "Tell me a story." --model Qwen/Qwen2.5-Omni-7B

Without `--model` it generates a small random checkpoint, which answers with random characters and noise at the level of
speech: enough to see the whole pipeline run, on a CPU too.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from vllm_omni_audio_perf.stage_configs_index import stage_config_path

SAMPLE_RATE = 24_000
MODALITIES = ("text", "audio")
STAGES = ("thinker", "talker", "code2wav")
SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, "
    "capable of perceiving auditory and visual inputs, as well as generating text and speech."
)
DEFAULT_QUESTION = "Explain the system architecture for a scalable audio generation pipeline. Answer in 15 words."


def text_query(question: str | None) -> dict[str, Any]:
    """A prompt of text alone."""
    return {
        "prompt": f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
        f"<|im_start|>user\n{DEFAULT_QUESTION if question is None else question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    }


QUERIES = {"text": text_query}


def small_checkpoint() -> Path:
    """The generated checkpoint in the user's cache folder, made on first use."""
    from vllm_omni_audio_perf.testing.checkpoint_cache import cached_qwen2_5_omni_checkpoint

    path = cached_qwen2_5_omni_checkpoint()
    print(f"No --model given: using the generated random checkpoint {path}. Its answers mean nothing.", flush=True)
    return path


def save(outputs: list[Any], folder: Path) -> list[dict[str, Any]]:
    """Write each request's text and waveform, and return one row of figures a request, in order of the prompts."""
    import soundfile

    rows: dict[str, dict[str, Any]] = {}
    for output in outputs:
        row = rows.setdefault(output.request_id, {"text": "", "wav": None, "audio_s": 0.0})
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
    return [rows[request] for request in sorted(rows, key=lambda request: int(request.split("_")[0]))]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table. RTF is the time of all stages over the duration of the audio; times include queueing."""
    from prettytable import PrettyTable

    out = PrettyTable(["text", "WAV", "audio s", *(f"{stage} s" for stage in STAGES), "RTF", "code2wav RTF"])
    out.align = "r"
    out.align["text"] = out.align["WAV"] = "l"
    out.max_width["text"] = 40
    for row in rows:
        text = row["text"] if len(row["text"]) <= 200 else row["text"][:200] + "..."
        times = [row.get(stage, 0.0) for stage in STAGES]
        rtfs = [f"{seconds / row['audio_s']:.2f}" if row["audio_s"] else "-" for seconds in (sum(times), times[-1])]
        out.add_row([text, row["wav"] or "-", f"{row['audio_s']:.2f}", *(f"{seconds:.2f}" for seconds in times), *rtfs])
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
    parser.add_argument("--query-type", "-q", choices=sorted(QUERIES), default="text", help="kind of prompt")
    parser.add_argument("--text", help="your own question")
    parser.add_argument("--num-prompts", type=int, default=1, help="how often to send the prompt (default: 1)")
    parser.add_argument(
        "--modalities",
        type=lambda value: value.split(","),
        default=list(MODALITIES),
        help="comma-separated outputs to produce (default: text,audio)",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("output_audio"), help="default: output_audio")
    parser.add_argument("--log-stats", action="store_true", help="log vLLM-Omni's statistics of every stage")
    args = parser.parse_args(argv)
    if args.num_prompts < 1:
        parser.error(f"--num-prompts is {args.num_prompts}; at least 1 is needed")
    if unknown := [name for name in args.modalities if name not in MODALITIES]:
        parser.error(f"--modalities: {', '.join(unknown)} is unknown; allowed: {', '.join(MODALITIES)}")
    if not args.stage_config.is_file():
        parser.error(f"--stage-config: there is no file {args.stage_config}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the example. Returns the exit code."""
    args = parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model = args.model or str(small_checkpoint())

    from vllm_omni.entrypoints.omni import Omni

    import vllm_omni_audio_perf

    vllm_omni_audio_perf.register()
    print("Starting the three stages. This takes minutes; on a CPU two to four.", flush=True)
    started = time.perf_counter()
    omni = Omni(model=model, deploy_config=str(args.stage_config), log_stats=args.log_stats)
    print(f"Ready after {time.perf_counter() - started:.0f} s.", flush=True)
    try:
        query = QUERIES[args.query_type](args.text) | {"modalities": args.modalities}
        rows = save(omni.generate([dict(query) for _ in range(args.num_prompts)]), args.output_dir)
    finally:
        omni.close()
    print(table(rows), flush=True)
    silent = sum(row["audio_s"] == 0 for row in rows) if "audio" in args.modalities else 0
    if silent or len(rows) < args.num_prompts:
        print(
            f"{args.num_prompts - len(rows)} prompts without an answer, {silent} answers without sound", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
