# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the stage within the engine, with processes that cost nothing in place of the engines."""

import io
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from tqdm import tqdm

from vllm_omni_audio_perf.architectures import QWEN2_5_OMNI
from vllm_omni_audio_perf.benchmarks import stage
from vllm_omni_audio_perf.benchmarks.stage import BenchmarkError, Child, Reply
from vllm_omni_audio_perf.cli import main
from vllm_omni_audio_perf.testing.checkpoint_writing import MARKER_FILE

CODES = [5, 6, 7]

# In place of the kinds of processes that there are; "engine" and "standalone" answer at once.
PROGRAM = """
import contextlib, os, subprocess, sys, time
import numpy as np
from vllm_omni_audio_perf.benchmarks import stage

def kind(name):
    def register(answer):
        @contextlib.contextmanager
        def process(**settings):
            yield {"LD_PRELOAD": "", "threads": 2}, lambda request: answer(request, **settings)
        stage._KINDS[name] = process
    return register

def waveform(codes, error):
    return np.sin(np.arange(480 * codes)).astype(np.float32) * (1 + error)

@kind("engine")
def engine(request, model, stage_config):
    import json
    talker, code2wav = json.load(open(stage_config))["stages"][1:]
    codes = talker["default_sampling_params"]["max_tokens"]
    ours = code2wav["model_arch"].startswith("AudioPerf")
    return stage.Reply(1.0 if ours else 2.0, waveform(codes, 1e-6 * ours), [MADE if ours else 3] * codes)

@kind("standalone")
def standalone(request, model, device, codes):
    ours = request == "plugin"
    return stage.Reply(1.0 if ours else 2.5, waveform(len(codes), 1e-7 * ours), codes)

@kind("echo")
def echo(request):
    print("got", request, flush=True)
    return request

@kind("sleep")
def sleep(request):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(request)

@kind("stubborn")
def stubborn(request):
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(1)

@kind("exit")
def exit(request):
    print("the reason", flush=True)
    os._exit(request)

@kind("fail")
def fail(request):
    raise LookupError(request)

stage.answer_requests()
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts the processes above in the place of the real ones."""

    def replace(made: int = 3) -> None:
        monkeypatch.setattr(stage, "_PROGRAM", PROGRAM.replace("MADE", str(made)))

    replace()
    return replace


@pytest.fixture
def start(processes: Callable[..., None], tmp_path: Path) -> Any:
    children: list[Child] = []

    def make(kind: str, **settings: Any) -> Child:
        child = Child(f"process {len(children)}", kind, settings, dict(os.environ), tmp_path)
        children.append(child)
        return child

    yield make
    for child in children:
        child.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What the benchmark looks at of a generated checkpoint."""
    folder = tmp_path / "generated"
    folder.mkdir()
    config = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"text_config": {"max_position_embeddings": 4096}},
        "talker_config": {"max_position_embeddings": 4096, "width": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "spk_dict.pt").write_text("voices")
    (folder / "model.safetensors").write_text("weights")
    (folder / MARKER_FILE).write_text("{}")
    return folder


def reply(seconds: float | None, scale: float = 1.0, codes: list[int] = CODES) -> Reply:
    return Reply(seconds, np.sin(np.arange(480 * len(codes))).astype(np.float32) * scale, codes)


def rounds(*seconds: tuple[float, float]) -> list[stage.Round]:
    return [{"stock": reply(stock), "plugin": reply(plugin)} for stock, plugin in seconds]


# ------------------------------------------------------------------------------------------------------ stage configs


@pytest.mark.parametrize("codes", [1, 250, 6000, stage.MAX_CODES])
def test_the_engines_differ_in_the_architecture_of_stage_2(codes: int, tmp_path: Path) -> None:
    upstream = pytest.importorskip("vllm_omni.config.stage_config")
    merged = {}
    for name in stage.VARIANTS:
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(stage.stage_config(name, codes)))
        merged[name] = upstream.resolve_deploy_yaml(path)

    architectures = [merged[name]["stages"][2].pop("model_arch") for name in stage.VARIANTS]
    assert merged["stock"] == merged["plugin"]
    assert architectures == ["Qwen2_5OmniForConditionalGeneration", QWEN2_5_OMNI]


def test_stock_is_what_the_pipeline_has_without_a_stage_config() -> None:
    pipeline = pytest.importorskip("vllm_omni.model_executor.models.qwen2_5_omni.pipeline").QWEN2_5_OMNI_PIPELINE
    thinker, talker, code2wav = stage.stage_config("stock", 250)["stages"]
    assert "model_arch" not in thinker
    assert talker["model_arch"] == code2wav["model_arch"] == pipeline.model_arch


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("codes", [1, 250, stage.MAX_CODES])
def test_the_engines_have_room_for_all_codes(
    codes: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = pytest.importorskip("vllm_omni.config.stage_config")
    pipeline = pytest.importorskip("vllm_omni.model_executor.models.qwen2_5_omni.pipeline").QWEN2_5_OMNI_PIPELINE
    if device == "cuda":
        monkeypatch.setattr(upstream, "_apply_platform_overrides", lambda deploy: deploy)
    path = tmp_path / "plugin.yaml"
    path.write_text(json.dumps(stage.stage_config("plugin", codes)))

    stages = upstream.merge_pipeline_deploy(pipeline, upstream.load_deploy_config(path))

    talker, code2wav = stages[1].yaml_extras["default_sampling_params"], stages[2].yaml_engine_args
    assert talker["min_tokens"] == talker["max_tokens"] == codes
    assert talker["repetition_penalty"] > 1  # of the shipped file, as the rest
    for one in stages[1:]:
        assert one.yaml_engine_args["max_model_len"] >= codes + len(stage.PROMPT["prompt"]) + 2
        assert one.yaml_engine_args["max_num_batched_tokens"] >= one.yaml_engine_args["max_model_len"]
        assert one.yaml_engine_args["seed"] == 0
    assert code2wav["additional_config"]["audio_perf"]["noise"] == "stage"
    assert code2wav["additional_config"]["audio_perf"]["max_mel_frames"] >= codes * stage.FRAMES_PER_CODE
    if device == "cuda":
        assert {one.yaml_runtime["devices"] for one in stages} == {"0"}
        assert sum(one.yaml_engine_args["gpu_memory_utilization"] for one in stages) <= 0.25


def test_a_generated_checkpoint_gets_the_positions_it_needs(checkpoint: Path, tmp_path: Path) -> None:
    made = stage.with_positions(checkpoint, tmp_path / "linked", stage.talker_length(6000))

    config = json.loads((made / "config.json").read_text())
    assert config["talker_config"] == {"max_position_embeddings": 6512, "width": 64}
    assert config["thinker_config"]["text_config"]["max_position_embeddings"] == 6512
    assert {file.name for file in made.iterdir()} == {file.name for file in checkpoint.iterdir()}
    assert (made / "model.safetensors").read_text() == "weights"
    assert json.loads((checkpoint / "config.json").read_text())["talker_config"]["max_position_embeddings"] == 4096


def test_another_checkpoint_is_taken_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / MARKER_FILE).unlink()
    assert stage.with_positions(checkpoint, tmp_path / "linked", 6512) == checkpoint
    assert not (tmp_path / "linked").exists()


# ----------------------------------------------------------------------------------------------------------- figures


def test_figures_of_the_stage() -> None:
    row = stage.stage_figures(rounds((9, 1))[0], rounds((2, 1), (8, 2), (6, 2)))

    assert (row["codes"], row["mel_frames"]) == (3, 6)
    assert row["pairs"] == 3  # the warm-up does not count
    assert row["audio_seconds"] == pytest.approx(0.06)
    assert (row["stock_seconds"], row["plugin_seconds"]) == (6, 2)
    assert (row["speedup"], row["speedup_min"], row["speedup_max"]) == (3, 2, 4)
    assert row["stock_rtf"] == pytest.approx(100)
    assert row["stock_seconds_each_round"] == [2, 8, 6]
    assert row["same_codes"] is True
    assert row["correlation"] == pytest.approx(1)
    assert row["rel_error"] == row["max_abs_diff"] == 0


def test_the_worst_round_and_the_warm_up_count_for_the_error() -> None:
    good, bad = rounds((2, 1), (2, 1))
    bad["plugin"] = reply(1, scale=1.25)
    for warm_up, measured in ((good, [good, bad]), (bad, [good])):
        assert stage.stage_figures(warm_up, measured)["rel_error"] == pytest.approx(0.25)


@pytest.mark.parametrize("name", stage.VARIANTS)
def test_other_codes_in_any_request_show(name: str) -> None:
    good, bad = rounds((2, 1), (2, 1))
    bad[name] = reply(1, codes=[5, 6, 8])
    assert stage.stage_figures(good, [good, bad])["same_codes"] is False
    assert stage.stage_figures(bad, [good])["same_codes"] is False


def test_the_stage_beside_the_generation_outside() -> None:
    row = stage.stage_figures(rounds((9, 9))[0], rounds((27, 10)))
    outside = stage.standalone_figures(rounds((30, 10), (20, 10), (40, 10)), row)

    assert (outside["standalone_speedup"], outside["standalone_stock_seconds"]) == (3, 30)
    assert outside["stage_over_standalone"] == pytest.approx(0.9)
    assert all("standalone" in name for name in outside)


def test_waveforms_are_compared_in_float64() -> None:
    expected = np.array([3.0, 4.0, -3.0, -4.0], dtype=np.float32)
    row = stage.compare(expected + np.float32(0.5), expected)
    assert row["max_abs_diff"] == 0.5
    assert row["rel_error"] == pytest.approx(1 / 50**0.5)
    assert row["correlation"] == pytest.approx(1)  # an offset is no difference for it
    assert stage.compare(-expected, expected)["correlation"] == pytest.approx(-1)


@pytest.mark.parametrize(("actual", "expected"), [(3, 4), (0, 0)])
def test_waveforms_that_cannot_be_compared(actual: int, expected: int) -> None:
    with pytest.raises(BenchmarkError, match=rf"the waveforms have {actual} samples \(plugin\) and {expected} \(stock"):
        stage.compare(np.zeros(actual), np.zeros(expected))


def test_table() -> None:
    row = stage.stage_figures(rounds((9, 1))[0], rounds((2, 1), (8, 2), (6, 2)))
    inside = stage.table(row)
    assert "3 codes, 0.06 s of sound" in inside
    assert "6 (2 to 8)" in inside
    assert "3.00x (2.00x to 4.00x)" in inside
    assert "yes" in inside
    assert "outside" not in inside

    row |= stage.standalone_figures(rounds((8, 2)), row) | {"same_codes": False}
    assert "4.00x (4.00x to 4.00x)" in stage.table(row)
    assert "0.75x" in stage.table(row)
    assert "NO" in stage.table(row)


def output(statistics: Any, durations: dict[str, float] | None = None) -> Any:
    return SimpleNamespace(metrics=statistics, stage_durations=durations or {})


def test_time_of_the_stage() -> None:
    statistics = {"stage_metrics": {"1": {"stage_gen_time_ms": 7.0}, "2": {"stage_gen_time_ms": 1500.0}}}
    assert stage.stage_seconds(output(statistics, {"stage_2_gen_ms": 1.0})) == 1.5
    del statistics["stage_metrics"]["2"]
    assert stage.stage_seconds(output(statistics, {"stage_2_gen_ms": 2500.0})) == 2.5
    for missing in (statistics, {}, None):
        assert stage.stage_seconds(output(missing)) is None


# ------------------------------------------------------------------------------------------------------------- rounds


@pytest.fixture
def bar() -> Any:
    return tqdm(total=10, file=io.StringIO())


def test_every_second_round_is_in_reverse_order(bar: Any) -> None:
    asked: list[str] = []
    ask = {name: lambda name=name: asked.append(name) or reply(1.0) for name in stage.VARIANTS}

    found = list(stage.alternate(ask, 3, bar, "request to"))

    assert asked == ["stock", "plugin", "plugin", "stock", "stock", "plugin"]
    assert [list(replies) for replies in found] == [["stock", "plugin"]] * 3
    assert (bar.n, bar.total) == (6, 10)


def test_a_round_without_a_time_is_made_up_for(bar: Any) -> None:
    times = iter([1.0, None, 2.0])
    ask = {"stock": lambda: reply(5.0), "plugin": lambda: reply(next(times))}

    found = list(stage.alternate(ask, 2, bar, "request to"))

    assert [replies["plugin"].seconds for replies in found] == [1.0, 2.0]
    assert (bar.n, bar.total) == (6, 12)


def test_times_that_stay_away_end_it(bar: Any) -> None:
    asked: list[int] = []
    ask = {"stock": lambda: reply(1.0), "plugin": lambda: asked.append(1) or reply(None)}
    with pytest.raises(BenchmarkError, match="2 of 2 rounds are without the stage's time"):
        list(stage.alternate(ask, 2, bar, "request to"))
    assert len(asked) == 4


def test_another_number_of_codes_is_refused() -> None:
    (replies,) = rounds((1, 1))
    stage.check_codes(replies, 3)
    with pytest.raises(BenchmarkError, match="the talker of the engine of stock made 3 codes, not 4"):
        stage.check_codes(replies, 4)


# ---------------------------------------------------------------------------------------------------------- processes


def test_threads_and_processes_of_a_stage() -> None:
    own = {"OMP_NUM_THREADS": "7", "VLLM_OMP_NUM_THREADS_SET_BY_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    assert stage.child_environment(own, "cpu", 2) == {"OMP_NUM_THREADS": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert stage.child_environment(own, "cuda", 2) == {"OMP_NUM_THREADS": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    assert own["OMP_NUM_THREADS"] == "7"


def test_more_codes_may_take_longer() -> None:
    limits = [stage.request_seconds(codes, "cpu") for codes in (1, 250, 500, 2000)]
    assert limits == sorted(limits)
    assert limits[2] > 1000


def test_a_process_answers_in_turn(start: Any) -> None:
    child = start("echo")
    assert child.receive(60) == {"LD_PRELOAD": "", "threads": 2}
    for request in (None, [1, 2], np.arange(3)):
        assert np.array_equal(child.ask(request, 60), request)


def test_a_failure_comes_with_its_reason_and_the_log(start: Any) -> None:
    child = start("fail")
    child.receive(60)
    with pytest.raises(BenchmarkError) as error:
        child.ask("nothing", 60)
    assert str(error.value).startswith("process 0 has failed: LookupError: nothing\nThe end of its log:\n")
    assert str(error.value).endswith("LookupError: nothing")


def test_a_process_that_ends_is_no_hang(start: Any) -> None:
    child = start("exit")
    child.receive(60)
    with pytest.raises(BenchmarkError, match="process 0 has ended with exit code 3\nThe end of its log:\nthe reason"):
        child.ask(3, 60)
    with pytest.raises(BenchmarkError, match="has ended with exit code 3"):
        child.ask(3, 60)


def test_a_killed_process_hints_at_memory(start: Any) -> None:
    child = start("sleep")
    child.receive(60)
    child._process.send_signal(signal.SIGKILL)
    with pytest.raises(BenchmarkError, match="exit code -9: is there enough memory"):
        child.ask(0, 60)


def test_a_failure_at_the_start_is_told(start: Any) -> None:
    with pytest.raises(BenchmarkError, match="process 0 has failed: KeyError: 'unknown'"):
        start("unknown").receive(60)


def test_a_hang_ends(start: Any) -> None:
    child = start("sleep")
    child.receive(60)
    with pytest.raises(BenchmarkError, match=r"process 0 has not answered within 0 s"):
        child.ask(600, 0.2)


def session_of(child: Child) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == child._process.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize("kind", ["echo", "sleep", "stubborn"])
def test_nothing_of_a_process_is_left(kind: str, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one that waits, nor of one that is at work, has children or heeds no signal."""
    monkeypatch.setattr(stage, "CLOSE_SECONDS", 3)
    child = start(kind)
    child.receive(60)
    if kind == "echo":
        child.ask(1, 60)
    else:
        child._send((600,))
        time.sleep(1)
        assert session_of(child)
    began = time.monotonic()

    child.close()

    assert time.monotonic() - began < 10
    for process in session_of(child):
        process.wait(5)
    assert session_of(child) == []


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM had been asked."""
    monkeypatch.setattr(stage, "resolve_device", lambda asked: "cpu")
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):  # the command sets them, unless they are
        monkeypatch.setenv(name, "")


def bench(checkpoint: Path, *arguments: str) -> int:
    return main(["bench", "stage", "--checkpoint", str(checkpoint), "--threads", "2", *arguments])


@pytest.mark.usefixtures("on_cpu", "processes")
def test_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"

    assert bench(checkpoint, "--codes", "10", "--rounds", "2", "--json", str(path)) == 0

    result = json.loads(path.read_text())
    assert result["benchmark"] == "stage"
    options = f"--codes 10 --rounds 2 --threads 2 --checkpoint {checkpoint}"
    assert result["command"] == f"vllm-omni-audio-perf bench stage {options}"
    assert result["settings"] == {
        "codes": 10,
        "rounds": 2,
        "standalone": True,
        "noise": "stage",
        "dtype": "float32",
        "checkpoint": "generated",
    }
    assert (result["device"]["type"], result["device"]["threads"]) == ("cpu", 2)
    assert set(result["versions"]) >= {"torch", "vllm", "vllm_omni", "plugin"}
    (row,) = result["rows"]
    assert (row["codes"], row["pairs"], row["same_codes"]) == (10, 2, True)
    assert (row["speedup"], row["standalone_speedup"], row["stage_over_standalone"]) == (2, 2.5, 0.8)
    assert (row["standalone_pairs"], row["standalone_threads"]) == (2, 2)
    assert row["rel_error"] == pytest.approx(1e-6, rel=0.1)
    out, err = capsys.readouterr()
    assert out.startswith("+--")
    assert "10 codes, 0.20 s of sound" in out
    assert "15/15" in err  # the progress bar


@pytest.mark.usefixtures("on_cpu", "processes")
def test_without_the_generation_outside(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"

    assert bench(checkpoint, "--codes", "10", "--rounds", "1", "--no-standalone", "--json", str(path)) == 0

    result = json.loads(path.read_text())
    assert result["command"].endswith("--no-standalone")
    assert not any("standalone" in field for field in result["rows"][0])
    assert "6/6" in capsys.readouterr().err


@pytest.mark.usefixtures("on_cpu")
def test_other_codes_are_a_failure(
    processes: Callable[..., None], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes(made=4)
    assert bench(checkpoint, "--codes", "10", "--rounds", "1", "--no-standalone") == 1
    assert "NO" in capsys.readouterr().out


@pytest.mark.usefixtures("on_cpu")
def test_a_failed_engine_is_told_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "_PROGRAM", "import sys; sys.exit('no engine today')")
    assert bench(checkpoint) == 1
    out, err = capsys.readouterr()
    assert out == ""
    message = err[err.index("vllm-omni-audio-perf bench stage: error: ") :]
    assert "the engine of stock has ended with exit code 1" in message
    assert message.endswith("no engine today\n")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("saved", [True, False])
def test_ctrl_c_reports_what_there_is(
    saved: bool, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: Any, device: str, environment: Any, save: Any) -> None:
        if saved:
            save(stage.stage_figures(rounds((2, 1))[0], rounds((2, 1))))
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "_measure", interrupted)
    assert bench(checkpoint) == 130
    assert ("2.00x" in capsys.readouterr().out) == saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codes", "0"], "'0' is not allowed; it takes a whole number from 1"),
        (["--codes", "15001"], "15001 is not allowed; it takes up to 15000 codes"),
        (["--rounds", "none"], "'none' is not allowed; it takes a whole number from 1"),
        (["--threads", "0"], "'0' is not allowed; it takes a whole number from 1"),
        (["--device", "npu"], "invalid choice: 'npu'"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "stage", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def refusal(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command that measures nothing."""
    monkeypatch.setattr(stage, "_measure", lambda *args: pytest.fail("it has begun"))
    assert main(["bench", "stage", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.usefixtures("on_cpu")
def test_a_result_that_could_not_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "result.json"
    assert f"--json {path}: there is no folder" in refusal(["--json", str(path)], monkeypatch, capsys)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("lacks", ["folder", "config.json", "spk_dict.pt", "type", "positions"])
def test_a_checkpoint_that_cannot_work_is_refused(
    lacks: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = checkpoint, f"there is no {lacks} in it"
    if lacks == "folder":
        folder, expected = checkpoint / "none", "there is no such folder"
    elif lacks == "type":
        (folder / "config.json").write_text('{"model_type": "mimo"}')
        expected = "is a 'mimo'; bench stage takes qwen2_5_omni"
    elif lacks == "positions":
        (folder / MARKER_FILE).unlink()
        expected = f"--codes 4000: the talker of {folder} has positions for 3584"
    else:
        (folder / lacks).unlink()
    assert expected in refusal(["--checkpoint", str(folder), "--codes", "4000"], monkeypatch, capsys)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("module", ["vllm", "vllm_omni"])
def test_without_vllm_omni_there_is_no_engine(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage.importlib.util, "find_spec", lambda name: None if name == module else object())
    assert f"there is no {module} here" in refusal([], monkeypatch, capsys)


def test_a_device_that_vllm_does_not_compute_on_is_refused() -> None:
    platforms = pytest.importorskip("vllm.platforms")
    found = platforms.current_platform.device_type
    other = "cpu" if found == "cuda" else "cuda"
    assert stage.resolve_device("auto") == stage.resolve_device(found) == found
    with pytest.raises(ValueError, match=f"--device {other}: vLLM computes on {found} here; allowed: auto, {found}"):
        stage.resolve_device(other)


@pytest.mark.slow
@pytest.mark.engine
def test_the_real_engines(qwen2_5_omni_checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm_omni")
    path = tmp_path / "result.json"

    arguments = ["--codes", "30", "--rounds", "1", "--threads", "1", "--json", str(path)]
    assert main(["bench", "stage", "--checkpoint", str(qwen2_5_omni_checkpoint), *arguments]) == 0

    (row,) = json.loads(path.read_text())["rows"]
    assert row["audio_seconds"] == pytest.approx(0.6)
    assert row["same_codes"]
    assert row["standalone_threads"] == 1
    for prefix in ("", "standalone_"):
        assert row[f"{prefix}correlation"] >= 0.9999
        assert row[f"{prefix}speedup"] > 0
