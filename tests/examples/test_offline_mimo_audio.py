# SPDX-License-Identifier: Apache-2.0
"""The offline example's command line, prompts and files; the engine tests run the rest of it."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm_omni")
soundfile = pytest.importorskip("soundfile")
torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/offline_inference/mimo_audio/end2end.py"
MEDIA = ROOT / "examples/media"
QUERY_TYPES = [
    "tts_sft",
    "tts_sft_with_instruct",
    "tts_sft_with_audio",
    "tts_sft_with_natural_instruction",
    "audio_trancribing_sft",
    "audio_understanding_sft",
    "audio_understanding_sft_with_thinking",
    "spoken_dialogue_sft_multiturn",
    "speech2text_dialogue_sft_multiturn",
    "text_dialogue_sft_multiturn",
]
ONE_RECORDING = ["tts_sft_with_audio", "audio_trancribing_sft", *QUERY_TYPES[5:7]]
SPEAKS = [*QUERY_TYPES[:5], "spoken_dialogue_sft_multiturn"]
AUDIO = "<|sosp|><|empty|><|eosp|>"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)  # as it is for a script
        # Examples of other models have modules of that name, too.
        patch.delitem(sys.modules, "queries", raising=False)
        namespace = runpy.run_path(str(EXAMPLE))
        del sys.modules["queries"]
    return namespace


@pytest.fixture
def prompts(example: dict[str, Any]) -> Any:
    """Makes the prompts of a command line."""

    def make(*arguments: object) -> list[dict[str, Any]]:
        return example["make_prompts"](example["parse_args"]([str(argument) for argument in arguments]))

    return make


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """One second of stereo at 8 kHz."""
    path = tmp_path / "recording.wav"
    soundfile.write(path, np.full((8_000, 2), 0.25), 8_000)
    return path


@pytest.mark.parametrize(
    "option", ["--stage-config", "--stage-configs-path", "--deploy-config", "--stage_configs_path"]
)
def test_stage_config_has_the_names_of_older_guides(option: str, example: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.touch()
    assert example["parse_args"]([option, str(config)]).stage_config == config


def test_upstreams_options(example: dict[str, Any], recording: Path) -> None:
    args = example["parse_args"](
        f"--model-name m --audio_path {recording} -q tts_sft_with_audio,tts_sft_with_instruct --instruct Loudly "
        "-t Hello. --enable-stats --num_prompts 2 --output_dir out".split()
    )
    assert (args.model, args.audio_path, args.instruct, args.text) == ("m", [recording], "Loudly", "Hello.")
    assert (args.log_stats, args.num_prompts, args.output_dir) == (True, 2, Path("out"))


def test_defaults(example: dict[str, Any]) -> None:
    args = example["parse_args"]([])
    assert args.stage_config.name == "mimo_audio.yaml"
    assert args.query_type == ["tts_sft"]
    assert args.output_dir == Path("output_audio")
    assert args.model is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; at least 1 is needed"),
        (["--max-tokens", "0"], "--max-tokens is 0; at least 1 is needed"),
        (["--stage-config", "missing.yaml"], "--stage-config: there is no file missing.yaml"),
        (["--query-type", "tts_sft,smell"], f"--query-type: smell is unknown; allowed: {', '.join(QUERY_TYPES)}"),
        (["-q", "tts_sft_with_audio", "-a", "missing.wav"], "--audio-path: there is no file missing.wav"),
        (["-q", "tts_sft_with_audio", "-a", str(MEDIA)], f"--audio-path: there is no file {MEDIA}"),
        (["-a", __file__], "--audio-path has no use with --query-type tts_sft"),
        (["-q", "audio_understanding_sft", *["-a", __file__] * 2], "is given 2 times; --query-type "),
        (["-q", "spoken_dialogue_sft_multiturn", *["-a", __file__] * 5], "_multiturn takes at most 4"),
        (["--instruct", "Loudly"], "--instruct has no use with --query-type tts_sft"),
        (["--text", " "], "--text is empty"),
        (["--seed", "1.5"], "invalid int value: '1.5'"),
        (["--seed=-1"], "--seed is -1; allowed: 0 to 9223372036854775807"),
    ],
)
def test_a_mistake_is_named(
    arguments: list[str], message: str, example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example["parse_args"](arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


# --------------------------------------------------------------------------------------------------------------------
# Prompts
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_type", QUERY_TYPES)
def test_form_of_every_prompt(query_type: str, prompts: Any) -> None:
    (prompt,) = prompts("-q", query_type)
    text = prompt["prompt"]
    recordings = prompt.get("multi_modal_data", {"audio": []})["audio"]
    assert text.count("<|empty|>") == len(recordings)
    assert text.startswith("<|im_start|>")
    turns = text.split("<|im_end|>\n")
    assert all(
        turn.startswith(("<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n")) for turn in turns
    )
    answer = turns[-1].removeprefix("<|im_start|>assistant\n")
    assert answer in ("<|sostm|>", "<think>\n", "<think>\n\n</think>\n")
    assert prompt["modalities"] == (["text", "audio"] if query_type in SPEAKS else ["text"])


@pytest.mark.parametrize(
    ("query_type", "expected"),
    [
        (
            "tts_sft",
            "<|im_start|>user\nPlease convert this text to speech: HERE<|im_end|>\n<|im_start|>assistant\n<|sostm|>",
        ),
        (
            "tts_sft_with_instruct",
            "<|im_start|>system\n你需要根据指定的风格指令和文本内容来生成语音。<|im_end|>\n"
            "<|im_start|>user\nPlease convert this text to speech: HERE(Whisper, as if it were a secret)<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n",
        ),
        (
            "tts_sft_with_audio",
            "<|im_start|>system\n你需要根据指定的风格指令和文本内容来生成和语音prompt具有相同音色的语音。"
            f"你的音色应该是\uff1a{AUDIO}<|im_end|>\n"
            "<|im_start|>user\nPlease convert this text to speech: HERE<|im_end|>\n<|im_start|>assistant\n<|sostm|>",
        ),
        (
            "tts_sft_with_natural_instruction",
            "<|im_start|>system\n你需要根据指定的风格指令和文本内容来生成语音。<|im_end|>\n"
            "<|im_start|>user\nHERE<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        ("audio_trancribing_sft", f"<|im_start|>user\n{AUDIO}HERE<|im_end|>\n<|im_start|>assistant\n<|sostm|>"),
        (
            "audio_understanding_sft",
            f"<|im_start|>user\n{AUDIO}HERE<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
        ),
        (
            "audio_understanding_sft_with_thinking",
            f"<|im_start|>user\n{AUDIO}HERE<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            "spoken_dialogue_sft_multiturn",
            f"<|im_start|>system\nYour voice should be:{AUDIO}<|im_end|>\n<|im_start|>user\n{AUDIO}<|im_end|>\n"
            "<|im_start|>assistant\n<|sostm|>HERE<|eot|><|empty|><|eostm|><|im_end|>\n"
            f"<|im_start|>user\n{AUDIO}<|im_end|>\n<|im_start|>assistant\n<|sostm|>",
        ),
        (
            "speech2text_dialogue_sft_multiturn",
            f"<|im_start|>user\n{AUDIO}<|im_end|>\n<|im_start|>assistant\nHERE<|im_end|>\n"
            f"<|im_start|>user\n{AUDIO}<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
    ],
)
def test_an_own_text_has_its_place(query_type: str, expected: str, prompts: Any) -> None:
    (prompt,) = prompts("-q", query_type, "--text", "Where are you?")
    assert prompt["prompt"] == expected.replace("HERE", "Where are you?")


def test_an_own_text_ends_the_text_dialogue(prompts: Any) -> None:
    (prompt,) = prompts("-q", "text_dialogue_sft_multiturn", "--text", "Sand.")
    assert prompt["prompt"].endswith("user\nSand.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n")
    assert prompt["prompt"].count("<|im_start|>user") == 2
    assert "multi_modal_data" not in prompt


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("hello there", "Please convert this text to speech: Hello there<"),
        ("STOP", "Please convert this text to speech: Stop<"),
        ("NASA said no", "Please convert this text to speech: NASA said no<"),
        ("今天天气真好", "请将这段文字转换为语音: 今天天气真好<"),
    ],
)
def test_a_text_is_read_as_in_the_training_data(text: str, read: str, prompts: Any) -> None:
    (prompt,) = prompts("--text", text)
    assert read in prompt["prompt"]


def test_own_instruction(prompts: Any) -> None:
    (prompt,) = prompts("-q", "tts_sft_with_instruct", "--text", "Go.", "--instruct", "Shout")
    assert "Go.(Shout)<|im_end|>" in prompt["prompt"]


def test_shipped_recordings(prompts: Any) -> None:
    (prompt,) = prompts("-q", "spoken_dialogue_sft_multiturn")
    recordings = prompt["multi_modal_data"]["audio"]
    shipped = {name: soundfile.info(MEDIA / f"{name}.flac").frames * 3 // 2 for name in ("sea", "tide")}  # 16 to 24 kHz
    assert [len(samples) for samples, _ in recordings] == [shipped[name] for name in ("tide", "sea", "tide", "sea")]
    for samples, rate in recordings:
        assert rate == 24_000
        assert samples.dtype == np.float32
        assert np.sqrt((samples**2).mean()) > 0.01


def test_an_earlier_answer_with_too_many_tokens_is_refused(example: dict[str, Any], prompts: Any) -> None:
    """Upstream inserts five groups after each five tokens but the last; more than there are stop its engine."""
    check = example["check_earlier_answer"]
    (shipped,) = prompts("-q", "spoken_dialogue_sft_multiturn")
    samples, _ = shipped["multi_modal_data"]["audio"][2]
    assert 16 < len(samples) / 24_000 / 0.16 < 17
    check(shipped, len)  # one token a character, as in the generated checkpoint
    (longest, longer) = (prompts("-q", "spoken_dialogue_sft_multiturn", "--text", "a" * n)[0] for n in (20, 21))
    check(longest, len)
    with pytest.raises(example["PromptError"], match=r"has 21 tokens; with a recording of 2\.56 s it may have 20\."):
        check(longer, len)
    check(prompts("-q", "tts_sft", "--text", "a" * 99)[0], len)


@pytest.mark.parametrize(("query_type", "most"), [*((name, 1) for name in ONE_RECORDING), (QUERY_TYPES[7], 4)])
def test_own_recordings_take_the_first_places(query_type: str, most: int, recording: Path, prompts: Any) -> None:
    for count in range(1, most + 1):
        (prompt,) = prompts("-q", query_type, *["-a", recording] * count)
        lengths = [len(samples) for samples, _ in prompt["multi_modal_data"]["audio"]]
        assert len(lengths) == most
        assert all(abs(length - 24_000) < 100 for length in lengths[:count])  # mono, and brought from 8 to 24 kHz
        assert all(length > 30_000 for length in lengths[count:])


def test_each_query_type_in_turn(prompts: Any) -> None:
    made = prompts("-q", "tts_sft_with_audio,tts_sft", "--num-prompts", 2)
    assert ["multi_modal_data" in prompt for prompt in made] == [True, True, False, False]
    assert len({id(prompt) for prompt in made}) == 4  # vLLM-Omni may write into one


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("MIMO_AUDIO_TOKENIZER_PATH", raising=False)
    return monkeypatch


def test_an_unreadable_file_is_named_before_anything_starts(
    example: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"no media at all")
    output = tmp_path / "out"
    arguments = ["-q", "tts_sft_with_audio", "-a", str(broken), "--output-dir", str(output), "--model", str(tmp_path)]
    assert example["main"](arguments) == 2
    assert f"{broken} cannot be read as audio" in capfd.readouterr().err
    assert not output.exists()


def test_an_earlier_answer_is_counted_with_the_models_tokenizer(
    example: dict[str, Any],
    mimo_audio_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_tokenizer: pytest.MonkeyPatch,
) -> None:
    no_tokenizer.setenv("MIMO_AUDIO_TOKENIZER_PATH", str(mimo_audio_checkpoint / "audio_tokenizer"))
    arguments = ["-q", "spoken_dialogue_sft_multiturn", "--text", "The tide comes in at half past seven."]
    assert (
        example["main"]([*arguments, "--model", str(mimo_audio_checkpoint), "--output-dir", str(tmp_path / "out")]) == 2
    )
    assert "--text: the assistant's earlier answer has 37 tokens; " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_audio_tokenizer_is_said_before_anything_starts(
    example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], no_tokenizer: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    assert example["main"](["--model", str(tmp_path), "--output-dir", str(output)]) == 2
    error = capsys.readouterr().err
    assert f"MIMO_AUDIO_TOKENIZER_PATH is not set, and there is no folder {tmp_path}/audio_tokenizer." in error
    assert "export MIMO_AUDIO_TOKENIZER_PATH=FOLDER" in error
    no_tokenizer.setenv("MIMO_AUDIO_TOKENIZER_PATH", "XiaomiMiMo/MiMo-Audio-Tokenizer")
    assert example["main"](["--model", str(tmp_path), "--output-dir", str(output)]) == 2
    assert "is XiaomiMiMo/MiMo-Audio-Tokenizer, but there is no such folder" in capsys.readouterr().err
    assert not output.exists()


def test_the_audio_tokenizer_is_the_environments_or_the_models(
    example: dict[str, Any], tmp_path: Path, no_tokenizer: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model/audio_tokenizer").mkdir(parents=True)
    assert example["audio_tokenizer"](str(tmp_path / "model")) == str(tmp_path / "model/audio_tokenizer")
    no_tokenizer.setenv("MIMO_AUDIO_TOKENIZER_PATH", str(tmp_path))
    assert example["audio_tokenizer"](str(tmp_path / "model")) == str(tmp_path)


def test_seed_and_length_are_the_talkers(example: dict[str, Any]) -> None:
    from vllm import SamplingParams

    defaults = [SamplingParams(seed=42, max_tokens=100, temperature=0.6), SamplingParams(seed=42, max_tokens=100)]
    given = example["parse_args"](["--seed", "0", "--max-tokens", "7"])
    talker, code2wav = example["sampling_params"](given, defaults)
    assert (talker.seed, talker.max_tokens, talker.temperature) == (0, 7, 0.6)
    assert (code2wav.seed, code2wav.max_tokens) == (42, 100)
    assert (defaults[0].seed, defaults[0].max_tokens) == (42, 100)
    talker, _ = example["sampling_params"](example["parse_args"]([]), defaults)
    assert (talker.seed, talker.max_tokens) == (42, 100)


def output(request_id: str, kind: str, content: Any, stage: str) -> SimpleNamespace:
    """What `Omni.generate` gives for a request and a kind of output."""
    return SimpleNamespace(
        request_id=request_id,
        final_output_type=kind,
        outputs=[SimpleNamespace(text=content)],
        multimodal_output={"audio": content} if kind == "audio" and content is not None else {},
        metrics={"stage_metrics": {stage: {"stage_gen_time_ms": 1500.0}}},
    )


def test_files_lie_in_a_folder_of_the_query_type(example: dict[str, Any], tmp_path: Path) -> None:
    args = example["parse_args"](["-q", "tts_sft,audio_understanding_sft", "--output-dir", str(tmp_path)])
    sound = torch.linspace(-0.5, 0.5, 4800)
    outputs = [
        output("1_b", "text", "Yes.", "0"),
        output("1_b", "audio", None, "1"),
        output("0_a", "audio", sound[:3000], "1"),
        output("0_a", "text", "Hello.", "0"),
        output("0_a", "audio", sound[3000:], "1"),
    ]
    rows = example["save"](outputs, args)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {
        "tts_sft/0_a.wav",
        "tts_sft/0_a.txt",
        "audio_understanding_sft/1_b.txt",
    }
    assert (tmp_path / "tts_sft/0_a.txt").read_text() == "Hello.\n"
    samples, rate = soundfile.read(tmp_path / "tts_sft/0_a.wav", dtype="float32")
    assert rate == 24_000
    np.testing.assert_allclose(samples, sound, atol=1e-4)
    assert [row["audio_s"] for row in rows] == [0.2, 0.0]

    lines = example["table"](rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[1], lines[3], lines[4])]
    assert cells[0] == ["query type", "text", "WAV", "audio s", "talker s", "code2wav s"]
    assert cells[1] == ["tts_sft", "Hello.", f"{tmp_path}/tts_sft/0_a.wav", "0.20", "1.50", "1.50"]
    assert cells[2] == ["audio_understanding_sft", "Yes.", "-", "0.00", "1.50", "1.50"]
