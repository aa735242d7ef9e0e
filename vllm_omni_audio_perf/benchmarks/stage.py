# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench stage`: Qwen2.5-Omni's code2wav stage within the real engine, stock beside ours.

Two engines run at the same time, in processes of their own, and get their requests in turn, so that a ratio compares
neighbours in time. Their stage configs differ in one line, the architecture of stage 2; the checkpoint, the prompt and
all seeds are the same, so that both solve the same codes from the same noise. The time of the stage is the one that the
engine reports. Afterwards a third process times whole generations outside any engine, for the same codes and with as
many threads, which shows how much of the speed-up reaches the engine.
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from vllm_omni_audio_perf.architectures import QWEN2_5_OMNI
from vllm_omni_audio_perf.benchmarks import harness
from vllm_omni_audio_perf.benchmarks.harness import Device
from vllm_omni_audio_perf.benchmarks.report import Row
from vllm_omni_audio_perf.options import SECTION, Token2WavOptions
from vllm_omni_audio_perf.stage_configs_index import stage_config_path

if TYPE_CHECKING:
    import numpy as np

VARIANTS = ("stock", "plugin")
ARCHITECTURES = {"stock": "Qwen2_5OmniForConditionalGeneration", "plugin": QWEN2_5_OMNI}
"""Of stage 2, the one thing in which the two engines differ."""

FRAMES_PER_CODE = 2
SAMPLE_RATE = 24_000
MAX_CODES = Token2WavOptions().max_mel_frames // FRAMES_PER_CODE
THINKER_TOKENS = 4096
TALKER_PROMPT = 512
"""Tokens of a stage beside the codes: more than the prompt below has."""

PROMPT = {
    "prompt": "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "modalities": ["text", "audio"],
}

START_SECONDS = 1200
CLOSE_SECONDS = 40
LOG_LINES = 30


class BenchmarkError(RuntimeError):
    """The benchmark cannot go on. The message says why, for a failed process with the end of its log."""


class Reply(NamedTuple):
    """What came of one request, or of one generation."""

    seconds: float | None
    """Of the stage, as the engine reports it; None if it did not."""
    waveform: "np.ndarray"
    """``[samples]`` float32, 24 kHz."""
    codes: list[int]
    """What the talker sent to the stage."""


Round = dict[str, Reply]
"""One reply of each variant."""


# ---------------------------------------------------------------------------------------------------- command line


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench stage`."""
    parser = subparsers.add_parser(
        "stage",
        help="Qwen2.5-Omni's code2wav stage within the real engine",
        description="Measure Qwen2.5-Omni's code2wav stage in vLLM-Omni's real three-stage pipeline, `stock` beside "
        "`plugin`, on the same codes and from the same noise, with the times that the engine reports. The checkpoint "
        "is generated and random: a tiny thinker and talker, and a Token2Wav of the 7B model's size in float32. Both "
        "engines are alive at once and get their requests in turn; on a GPU all stages are on the first card. Whole "
        "generations outside the engine follow, for comparison.",
    )
    parser.add_argument(
        "--codes",
        type=_codes,
        default=250,
        metavar="N",
        help=f"codes of each request, of 20 ms or {FRAMES_PER_CODE} mel frames each; up to {MAX_CODES}, 5 minutes of "
        "sound, where vLLM-Omni cuts, and with trained weights as far as the talker's positions go. Time and memory of "
        "`stock` grow with the square: on two CPU cores 250 take a quarter of an hour in all; 6000, two minutes of "
        "sound, are for a GPU (default: 250)",
    )
    parser.add_argument(
        "--rounds",
        type=harness.positive,
        default=3,
        metavar="N",
        help="requests to each engine that count, after one that does not (default: 3)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there, after each round")
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where to compute; another device than the installed vLLM was built for is refused (default: auto)",
    )
    parser.add_argument(
        "--threads",
        type=harness.positive,
        metavar="N",
        help="threads of each stage and of the generations outside the engine (default: torch's own number)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder of a Qwen2.5-Omni checkpoint (default: what `make-checkpoint qwen2_5_omni DIR --token2wav real` "
        "writes, generated once into the user's cache folder, 1.9 GB)",
    )
    parser.add_argument(
        "--standalone",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time whole generations outside the engine (default: --standalone)",
    )
    parser.set_defaults(run=functools.partial(run, parser), plot=None)


def _codes(text: str) -> int:
    """An argparse type: a number of codes."""
    codes = harness.positive(text)
    if codes > MAX_CODES:
        raise argparse.ArgumentTypeError(f"{codes} is not allowed; it takes up to {MAX_CODES} codes")
    return codes


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure and report: a table on stdout, the JSON where asked for.

    Ctrl-C after the first full round ends the measuring, and what there is by then is reported.

    Returns:
        The exit code: 0; 1 if a process failed, or if the two engines did not get the same codes; 130 after Ctrl-C.

    Raises:
        ValueError: for settings that cannot be used here.
    """
    harness.check_outputs(args)
    if args.checkpoint is not None:
        check_checkpoint(args.checkpoint, args.codes)
    for module in ("vllm", "vllm_omni"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"bench stage runs vLLM-Omni's engine, and there is no {module} here")
    environment = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the table
    device = resolve_device(args.device)
    threads = args.threads or _torch_threads()
    result: dict[str, Any] = {
        "benchmark": "stage",
        "command": command_line(parser, args),
        "date": date.today().isoformat(),
        "versions": harness.versions(),
        "device": {"type": device, "name": Device(device).describe()["name"], "threads": threads},
        "settings": {
            "codes": args.codes,
            "rounds": args.rounds,
            "standalone": args.standalone,
            "noise": "stage",
            "dtype": "float32",
            "checkpoint": "generated" if args.checkpoint is None else args.checkpoint.name,
        },
        "rows": [],
    }
    row: Row = {}

    def save(figures: Row) -> None:
        row.update(figures)
        result["rows"] = [row]
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    exit_code = 0
    try:
        _measure(args, device, child_environment(environment, device, threads), save)
    except KeyboardInterrupt:
        if not row:
            raise
        exit_code = 128 + signal.SIGINT
    except BenchmarkError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        exit_code = 1
    if row:
        print(table(row))
        print("Seconds and ratios are medians over the rounds (smallest to largest).")
        exit_code = exit_code or int(not row["same_codes"])
    return exit_code


def command_line(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The command that measures the same again, without the files that it writes."""
    settings = {name: getattr(args, name) for name in ("codes", "rounds", "device", "threads", "checkpoint")}
    command = harness.command_line(parser, settings, "codes")
    return command if args.standalone else f"{command} --no-standalone"


def resolve_device(asked: str) -> str:
    """Where vLLM computes here: "cpu" or "cuda".

    Raises:
        ValueError: if that is another one than asked for, or neither.
    """
    from vllm.platforms import current_platform

    found = str(current_platform.device_type)
    if found not in ("cpu", "cuda"):
        raise ValueError(f"vLLM computes on {found!r} here; bench stage runs on cpu and cuda")
    if asked not in ("auto", found):
        raise ValueError(f"--device {asked}: vLLM computes on {found} here; allowed: auto, {found}")
    return found


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


# ------------------------------------------------------------------------------------- checkpoint and stage configs


def check_checkpoint(folder: Path, codes: int) -> None:
    """Refuse what the pipeline could not run with so many codes.

    Raises:
        ValueError: for a folder that is none, or holds no Qwen2.5-Omni or one with too few positions.
    """
    if not folder.is_dir():
        raise ValueError(f"--checkpoint {folder}: there is no such folder")
    for name in ("config.json", "spk_dict.pt"):
        if not (folder / name).is_file():
            raise ValueError(f"--checkpoint {folder}: there is no {name} in it")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "qwen2_5_omni":
        raise ValueError(f"--checkpoint {folder} is a {config.get('model_type')!r}; bench stage takes qwen2_5_omni")
    allowed = config["talker_config"]["max_position_embeddings"] - TALKER_PROMPT
    if codes > allowed and not _is_generated(folder):
        raise ValueError(f"--codes {codes}: the talker of {folder} has positions for {allowed}")


def _is_generated(folder: Path) -> bool:
    from vllm_omni_audio_perf.testing.checkpoint_writing import MARKER_FILE

    return (folder / MARKER_FILE).is_file()


def with_positions(checkpoint: Path, folder: Path, positions: int) -> Path:
    """A generated checkpoint whose thinker and talker have at least so many positions. No weight depends on them.

    Args:
        checkpoint: of any origin; one that was not generated is returned as it is.
        folder: to be made; gets links to all other files.
        positions: tokens of a request.
    """
    if not _is_generated(checkpoint):
        return checkpoint
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for part in (config["thinker_config"]["text_config"], config["talker_config"]):
        part["max_position_embeddings"] = max(part["max_position_embeddings"], positions)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder


def talker_length(codes: int) -> int:
    """Tokens for which talker and code2wav have room: the codes and a prompt."""
    return max(THINKER_TOKENS, codes + TALKER_PROMPT)


def stage_config(name: str, codes: int) -> dict[str, Any]:
    """The stage config of a variant, upon the shipped `qwen2_5_omni`.

    The talker is stock in both and makes neither fewer nor more codes. On a GPU all stages are on the first card, with
    shares that leave half of it to what stock's solves need; on a CPU the shipped file's own section goes before that.
    """
    small = {"devices": "0", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    options = {"noise": "stage", "max_mel_frames": MAX_CODES * FRAMES_PER_CODE}
    return {
        "base_config": str(stage_config_path("qwen2_5_omni")),
        "stages": [
            {"stage_id": 0, "max_model_len": THINKER_TOKENS, "default_sampling_params": {"max_tokens": 64}, **small},
            {
                "stage_id": 1,
                "model_arch": ARCHITECTURES["stock"],
                "max_model_len": talker_length(codes),
                "seed": 0,
                "default_sampling_params": {"min_tokens": codes, "max_tokens": codes},
                **small,
            },
            {
                "stage_id": 2,
                "model_arch": ARCHITECTURES[name],
                "additional_config": {SECTION: options},
                "max_model_len": talker_length(codes),
                "seed": 0,  # of the stage's random state, from which the noise is drawn
                "devices": "0",
            },
        ],
    }


# ----------------------------------------------------------------------------------------------------- the measuring


def _measure(args: argparse.Namespace, device: str, environment: dict[str, str], save: Callable[[Row], None]) -> None:
    """Run the processes, in the given environment; `save` gets the figures that are new after each round."""
    checkpoint = args.checkpoint
    if checkpoint is None:
        from vllm_omni_audio_perf.testing.checkpoint_cache import cached_qwen2_5_omni_checkpoint

        checkpoint = cached_qwen2_5_omni_checkpoint("real")
    steps = (2 + args.standalone) + 2 * (1 + args.rounds) * (1 + args.standalone)
    seconds = request_seconds(args.codes, device)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="audio-perf-")))
        bar = stack.enter_context(tqdm(total=steps, unit="step"))
        model = with_positions(checkpoint, folder / "checkpoint", talker_length(args.codes))
        with ExitStack() as engines:
            children: dict[str, Child] = {}
            for name in VARIANTS:
                config = folder / f"{name}.yaml"
                config.write_text(json.dumps(stage_config(name, args.codes), indent=2), encoding="utf-8")
                settings: dict[str, Any] = {"model": str(model), "stage_config": str(config)}
                children[name] = Child(f"the engine of {name}", "engine", settings, environment, folder)
                engines.callback(children[name].close)
            for child in children.values():
                engines.callback(child.let_go)  # before any is waited for
            bar.set_postfix_str("starting two engines, which takes minutes")
            for child in children.values():
                preloaded = child.receive(START_SECONDS)["LD_PRELOAD"]
                bar.update()
            ask = {name: functools.partial(child.ask, None, seconds) for name, child in children.items()}
            (warm_up,) = alternate(ask, 1, bar, "warm-up in the engine of")
            check_codes(warm_up, args.codes)
            rounds: list[Round] = []
            for replies in alternate(ask, args.rounds, bar, "a request to the engine of"):
                rounds.append(replies)
                save(stage_figures(warm_up, rounds))
        if not args.standalone:
            return
        settings = {"model": str(model), "device": device, "codes": warm_up["stock"].codes}
        bar.set_postfix_str("building both outside the engine")
        with contextlib.closing(
            Child(
                "the process without an engine",
                "standalone",
                settings,
                environment | ({"LD_PRELOAD": preloaded} if preloaded else {}),  # the allocator that the stages have
                folder,
            )
        ) as child:
            save({"standalone_threads": child.receive(START_SECONDS)["threads"]})
            bar.update()
            stage = stage_figures(warm_up, rounds)
            ask = {name: functools.partial(child.ask, name, seconds) for name in VARIANTS}
            (warm_up,) = alternate(ask, 1, bar, "warm-up outside the engine:")
            outside: list[Round] = []
            for replies in alternate(ask, args.rounds, bar, "outside the engine:"):
                outside.append(replies)
                save(standalone_figures(outside, stage))


def request_seconds(codes: int, device: str) -> float:
    """The longest that a request may take, several times what stock needs on a busy machine: it is to end a hang."""
    if device == "cuda":
        return 1800
    return 300 + 2 * codes + 300 * max(1, codes / 250) ** 2


def child_environment(environment: Mapping[str, str], device: str, threads: int) -> dict[str, str]:
    """The environment of a process that computes, from the caller's.

    Where nothing says how many threads a stage has, vLLM gives it one. On a CPU a stage is one process, whatever the
    caller has set: with two vLLM binds the threads by itself.
    """
    result = dict(environment) | {"OMP_NUM_THREADS": str(threads)}
    result.pop("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", None)  # else vLLM takes our number for its own, and changes it
    if device == "cpu":
        result["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return result


def alternate(ask: Mapping[str, Callable[[], Reply]], rounds: int, bar: "tqdm[Any]", what: str) -> Iterator[Round]:
    """Ask each variant once a round, every second round in reverse order.

    A round in which the engine reported no time is given up and made up for, as often as there are rounds.

    Args:
        ask: makes one request of a variant and waits for its reply.
        rounds: that are complete.
        bar: to show progress on, a step a reply.
        what: is done, before the variant's name.

    Raises:
        BenchmarkError: if too many rounds have no time.
    """
    left = rounds
    for number in range(2 * rounds):
        names = list(ask) if number % 2 == 0 else list(ask)[::-1]
        replies: Round = {}
        for name in names:
            bar.set_postfix_str(f"{what} {name}")
            replies[name] = ask[name]()
            bar.update()
        if any(reply.seconds is None for reply in replies.values()):
            bar.total = (bar.total or 0) + len(names)
            continue
        yield {name: replies[name] for name in ask}
        left -= 1
        if not left:
            return
    raise BenchmarkError(f"{what} {', '.join(ask)}: {left} of {rounds} rounds are without the stage's time")


def check_codes(replies: Round, codes: int) -> None:
    """Refuse a run whose talker did not do as it was told.

    Raises:
        BenchmarkError: for another number of codes.
    """
    for name, reply in replies.items():
        if len(reply.codes) != codes:
            raise BenchmarkError(f"the talker of the engine of {name} made {len(reply.codes)} codes, not {codes}")


# ---------------------------------------------------------------------------------------------------------- figures


def stage_figures(warm_up: Round, rounds: Sequence[Round]) -> Row:
    """The figures of the stage within the engine.

    Args:
        warm_up: counts for what the replies contain, not for times.
        rounds: at least one.
    """
    codes, waveform = warm_up["stock"].codes, warm_up["stock"].waveform
    audio_seconds = len(waveform) / SAMPLE_RATE
    row = _times(rounds, len(codes))
    row |= {
        "mel_frames": FRAMES_PER_CODE * len(codes),
        "audio_seconds": audio_seconds,
        "same_codes": all(reply.codes == codes for replies in (warm_up, *rounds) for reply in replies.values()),
    }
    for name in VARIANTS:
        row[f"{name}_rtf"] = row[f"{name}_seconds"] / audio_seconds
    return row | _worst(warm_up, *rounds)


def standalone_figures(rounds: Sequence[Round], stage: Row) -> Row:
    """The figures of whole generations outside the engine, all named "standalone", and how the stage compares.

    Args:
        rounds: at least one.
        stage: from `stage_figures`.
    """
    row = _times(rounds, stage["codes"]) | _worst(*rounds)
    figures = {f"standalone_{name}": value for name, value in row.items() if name != "codes"}
    return figures | {"stage_over_standalone": stage["speedup"] / row["speedup"]}


def _times(rounds: Sequence[Round], codes: int) -> Row:
    seconds = {(codes, name): [float(replies[name].seconds or 0) for replies in rounds] for name in VARIANTS}
    (row,) = harness.summarize(VARIANTS, seconds, {}, length_name="codes")
    return row | {f"{name}_seconds_each_round": seconds[codes, name] for name in VARIANTS}


def _worst(*rounds: Round) -> Row:
    found = [compare(replies["plugin"].waveform, replies["stock"].waveform) for replies in rounds]
    return {
        "correlation": min(row["correlation"] for row in found),
        "rel_error": max(row["rel_error"] for row in found),
        "max_abs_diff": max(row["max_abs_diff"] for row in found),
    }


def compare(actual: "np.ndarray", expected: "np.ndarray") -> Row:
    """How a waveform resembles another one, in float64.

    Raises:
        BenchmarkError: if their lengths differ, or there is nothing in them.
    """
    import numpy as np

    if actual.shape != expected.shape or not expected.size:
        raise BenchmarkError(f"the waveforms have {actual.size} samples (plugin) and {expected.size} (stock)")
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    difference = actual - expected
    return {
        "correlation": float(np.corrcoef(actual, expected)[0, 1]),
        "rel_error": float(np.linalg.norm(difference) / np.linalg.norm(expected)),
        "max_abs_diff": float(np.abs(difference).max()),
    }


def table(row: Row) -> str:
    """The figures for people; what a row does not have is left out."""
    from prettytable import PrettyTable

    def spread(field: str, form: str) -> str:
        return f"{form.format(row[field])} ({form.format(row[f'{field}_min'])} to {form.format(row[f'{field}_max'])})"

    title = f"{row['codes']} codes, {row['audio_seconds']:.2f} s of sound"
    out = PrettyTable([title, *VARIANTS, "speed-up"], align="r")
    out.align[title] = "l"
    for prefix, name in (("", "stage 2 within the engine"), ("standalone_", "outside the engine")):
        if f"{prefix}speedup" in row:
            seconds = [spread(f"{prefix}{variant}_seconds", "{:.4g}") for variant in VARIANTS]
            out.add_row([f"{name}, s", *seconds, spread(f"{prefix}speedup", "{:.2f}x")])
    out.add_row(["stage 2, real-time factor", *(f"{row[f'{name}_rtf']:.3g}" for name in VARIANTS), ""])
    if "stage_over_standalone" in row:
        out.add_row(["speed-up of the stage to that outside", "", "", f"{row['stage_over_standalone']:.2f}x"])
    out.add_row(["rounds", row["pairs"], row["pairs"], ""])
    out.add_row(["same codes", "", "yes" if row["same_codes"] else "NO", ""])
    out.add_row(["correlation with stock", "", f"{row['correlation']:.9f}", ""])
    out.add_row(["relative error to stock", "", f"{row['rel_error']:.1e}", ""])
    return out.get_string()


# -------------------------------------------------------------------------------------------------------- processes


class Child:
    """A process that answers requests one at a time, in a session of its own, which ends with it.

    Args:
        name: for messages.
        kind: of `_KINDS`.
        settings: of that kind.
        environment: of the process.
        folder: where its log goes.
    """

    def __init__(
        self, name: str, kind: str, settings: dict[str, Any], environment: dict[str, str], folder: Path
    ) -> None:
        self._name = name
        self._log = folder / f"{name.replace(' ', '_')}.log"
        self._connection, theirs = multiprocessing.Pipe()
        with self._log.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._is_busy = False
        self._send((kind, settings))

    def _send(self, message: Any) -> None:
        self._is_busy = True
        with contextlib.suppress(OSError):  # of a process that has ended; `receive` says so
            self._connection.send(message)

    def ask(self, request: Any, seconds: float) -> Any:
        """Send a request and wait for the reply.

        Raises:
            BenchmarkError: as `receive`.
        """
        self._send((request,))
        return self.receive(seconds)

    def receive(self, seconds: float) -> Any:
        """Wait for a reply.

        Raises:
            BenchmarkError: if there is none within so many seconds, or the process fails or ends.
        """
        try:
            if not self._connection.poll(seconds):
                raise self._failure(f"has not answered within {seconds:.0f} s")
            failed, value = self._connection.recv()
            self._is_busy = False
        except (EOFError, OSError):
            self._process.wait()
            code = self._process.returncode
            hint = ": is there enough memory?" if code == -signal.SIGKILL else ""
            raise self._failure(f"has ended with exit code {code}{hint}") from None
        if failed:
            raise self._failure(f"has failed: {value}")
        return value

    def _failure(self, what: str) -> BenchmarkError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n".join(lines[-LOG_LINES:])
        return BenchmarkError(f"{self._name} {what}\nThe end of its log:\n{end}")

    def let_go(self) -> None:
        """Have the process end itself, and do not wait for it."""
        if not self._connection.closed:
            self._connection.close()  # ends its wait for a request
            if self._is_busy:
                self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the process and whatever it has started. It has some time to do so itself."""
        try:
            self.let_go()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        finally:
            kill_session(self._process.pid)
            self._process.wait()


def kill_session(session: int) -> None:
    """Kill every process of a session. By session because vLLM's processes rename themselves."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session:
                process.kill()


_PROGRAM = "from vllm_omni_audio_perf.benchmarks.stage import answer_requests; answer_requests()"


def answer_requests() -> None:
    """What a `Child` runs: builds what it is told to, says that it is ready and answers until the other end closes."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # `Child.let_go` sends it; a script's background ignores it
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        kind, settings = connection.recv()
        with _KINDS[kind](**settings) as (ready, answer):
            connection.send((False, ready))
            while True:
                (request,) = connection.recv()
                connection.send((False, answer(request)))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return  # the other end has gone, or wants this one to go
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send((True, f"{type(error).__name__}: {error}"))


Answering = tuple[Any, Callable[[Any], Reply]]
"""What a process says when it is ready, and how it answers a request."""


@contextmanager
def _engine(model: str, stage_config: str) -> Iterator[Answering]:
    """vLLM-Omni's pipeline. Each request is the same prompt."""
    import numpy as np
    from vllm_omni.entrypoints.omni import Omni

    import vllm_omni_audio_perf
    from vllm_omni_audio_perf import compat

    vllm_omni_audio_perf.register()
    sent: list[list[int]] = []

    def noting(upstream: Callable[..., Any]) -> Callable[..., Any]:
        # This process hands the talker's output on: it is where the codes can be seen without touching a stage.
        def process(
            source_outputs: list[Any], prompt: Any = None, multimodal: bool = False, *, target_model_config: Any = None
        ) -> Any:
            sent.extend(list(output.outputs[0].cumulative_token_ids) for output in source_outputs)
            return upstream(source_outputs, prompt, multimodal, target_model_config=target_model_config)

        return process

    compat.wrap_qwen2_5_omni_stage_inputs(talker=lambda upstream: upstream, code2wav=noting)
    omni = Omni(model=model, deploy_config=stage_config)

    def answer(request: None) -> Reply:
        sent.clear()
        outputs = omni.generate([copy.deepcopy(PROMPT)], use_tqdm=False)
        (output,) = [output for output in outputs if output.final_output_type == "audio"]
        (codes,) = sent
        waveform = output.multimodal_output["audio"].float().cpu().numpy().reshape(-1)
        return Reply(stage_seconds(output), np.ascontiguousarray(waveform), codes)

    try:
        yield {"LD_PRELOAD": os.environ.get("LD_PRELOAD", "")}, answer
    finally:
        omni.close()


def stage_seconds(output: Any) -> float | None:
    """The engine's own time of stage 2 for a request, in seconds; None where it did not say.

    vLLM-Omni 0.30.0 leaves a stage out of its statistics when a message of it lies at the address of an earlier one;
    the same time then still stands among the durations.
    """
    stages = output.metrics.get("stage_metrics", {}) if isinstance(output.metrics, dict) else {}
    milliseconds = stages.get("2", {}).get("stage_gen_time_ms") or output.stage_durations.get("stage_2_gen_ms")
    return milliseconds / 1000 if milliseconds else None


@contextmanager
def _standalone(model: str, device: str, codes: list[int]) -> Iterator[Answering]:
    """Upstream's Token2Wav and ours over it, with random weights, without an engine. A request names one of the two."""
    import torch
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniConfig

    from vllm_omni_audio_perf.graphs import CaptureBudget, CudaGraphBackend
    from vllm_omni_audio_perf.qwen2_5_omni.speakers import DEFAULT_SPEAKER, load_speakers
    from vllm_omni_audio_perf.testing import upstream
    from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler, Synthesizer

    config = Qwen2_5OmniConfig.from_pretrained(model).token2wav_config
    token2wav: Any = upstream.build_vllm_omni_token2wav(config).to(device)
    dit = BlockDiT(token2wav.code2wav_dit_model)
    synthesizer = Synthesizer(Sampler(dit), token2wav.code2wav_bigvgan_model)
    speaker = load_speakers(Path(model), torch.device(device))[DEFAULT_SPEAKER]
    ids = torch.tensor(codes, device=device)
    frames = synthesizer.mel_frames(len(codes))
    options = Token2WavOptions()
    if device == "cuda" and frames <= options.graph_mel_frames:  # as the stage does
        budget = CaptureBudget(seconds=options.graph_seconds, mib=options.graph_memory_mib)
        synthesizer.sampler.capture([math.ceil(frames / dit.block_size)], backend=CudaGraphBackend(), budget=budget)

    def stock() -> torch.Tensor:
        return token2wav(code=ids[None], conditioning=speaker.embedding, reference_mel=speaker.reference_mel)

    def plugin() -> torch.Tensor:
        noise = torch.randn(1, frames, dit.mel_dim, device=device)  # as stock draws it
        (waveform,) = synthesizer.generate([Clip(ids, *speaker, noise)])
        if isinstance(waveform, Exception):
            raise waveform
        return waveform

    def answer(name: str) -> Reply:
        torch.manual_seed(0)
        with torch.inference_mode():
            start = time.perf_counter()
            waveform = {"stock": stock, "plugin": plugin}[name]().reshape(-1).float().cpu().numpy()
            return Reply(time.perf_counter() - start, waveform, codes)

    yield {"threads": torch.get_num_threads()}, answer


_KINDS: dict[str, Callable[..., contextlib.AbstractContextManager[Answering]]] = {
    "engine": _engine,
    "standalone": _standalone,
}
