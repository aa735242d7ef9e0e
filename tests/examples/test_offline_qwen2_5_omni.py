# SPDX-License-Identifier: Apache-2.0
"""The offline example's command line, prompts and table; the engine tests run the rest of it."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm_omni")
soundfile = pytest.importorskip("soundfile")
Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/offline_inference/qwen2_5_omni/end2end.py"
MEDIA = ROOT / "examples/media"
QUERY_TYPES = [
    "text",
    "use_audio",
    "use_image",
    "use_video",
    "use_multi_audios",
    "use_mixed_modalities",
    "use_audio_in_video",
]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)  # as it is for a script
        return runpy.run_path(str(EXAMPLE))


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


def test_defaults(example: dict[str, Any]) -> None:
    args = example["parse_args"]([])
    assert args.stage_config.name == "qwen2_5_omni.yaml"
    assert args.query_type == ["text"]
    assert args.modalities == ["text", "audio"]
    assert args.model is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; at least 1 is needed"),
        (["--num-frames", "0"], "--num-frames is 0; at least 1 is needed"),
        (["--sampling-rate", "-1"], "--sampling-rate is -1; at least 1 is needed"),
        (["--modalities", "text,vidio"], "--modalities: vidio is unknown; allowed: text, audio"),
        (["--stage-config", "missing.yaml"], "--stage-config: there is no file missing.yaml"),
        (["--query-type", "text,smell"], f"--query-type: smell is unknown; allowed: {', '.join(QUERY_TYPES)}"),
        (["-q", "use_audio", "--audio-path", "missing.wav"], "--audio-path: there is no file missing.wav"),
        (["-q", "use_image", "--image-path", "missing.png"], "--image-path: there is no file missing.png"),
        (["-q", "use_video", "--video-path", str(MEDIA)], f"--video-path: there is no file {MEDIA}"),
        (["--audio-path", __file__], "--audio-path has no use with --query-type text"),
        (
            ["-q", "use_audio,text", "--image-path", __file__],
            "--image-path has no use with --query-type use_audio,text",
        ),
        (["-q", "use_audio", "-a", __file__, "-a", __file__], "given 2 times; --query-type use_audio takes at most 1"),
        (["-q", "use_multi_audios", *["-a", __file__] * 3], "given 3 times; --query-type use_multi_audios takes at"),
        (["--speaker", " "], "--speaker is empty"),
        (["--seed", "1.5"], "invalid int value: '1.5'"),
        (["--seed=-1"], "--seed is -1; allowed: 0 to 9223372036854775807"),
        (["--seed", str(2**63)], "--seed is 9223372036854775808; allowed: 0 to 9223372036854775807"),
    ],
)
def test_a_mistake_is_named(
    arguments: list[str], message: str, example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example["parse_args"](arguments)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("query_type", QUERY_TYPES)
def test_a_place_in_the_text_for_each_item(query_type: str, prompts: Any) -> None:
    (prompt,) = prompts("-q", query_type)
    data = prompt.get("multi_modal_data", {})
    counts = {kind: len(items) if isinstance(items, list) else 1 for kind, items in data.items()}
    expected: dict[str, dict[str, int]] = {
        "text": {},
        "use_audio": {"audio": 1},
        "use_image": {"image": 1},
        "use_video": {"video": 1},
        "use_multi_audios": {"audio": 2},
        "use_mixed_modalities": {"audio": 1, "image": 1, "video": 1},
        "use_audio_in_video": {"audio": 1, "video": 1},
    }
    assert counts == expected[query_type]
    in_video = query_type == "use_audio_in_video"  # the sound has its place within the video's
    text = prompt["prompt"]
    assert text.count("<|audio_bos|><|AUDIO|><|audio_eos|>") == text.count("<|AUDIO|>")
    assert text.count("<|AUDIO|>") == (0 if in_video else counts.get("audio", 0))
    assert text.count("<|vision_bos|><|IMAGE|><|vision_eos|>") == counts.get("image", 0)
    assert text.count("<|vision_bos|><|VIDEO|><|vision_eos|>") == counts.get("video", 0)
    assert prompt.get("mm_processor_kwargs") == ({"use_audio_in_video": True} if in_video else None)
    assert text.startswith("<|im_start|>system\nYou are Qwen, ")
    assert "<|im_end|>\n<|im_start|>user\n" in text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert prompt["modalities"] == ["text", "audio"]


@pytest.mark.parametrize("query_type", QUERY_TYPES)
def test_an_own_question_stands_after_the_media(query_type: str, prompts: Any) -> None:
    (own,), (shipped,) = prompts("-q", query_type, "--text", "How are you?"), prompts("-q", query_type)
    assert own["prompt"].endswith("How are you?<|im_end|>\n<|im_start|>assistant\n")
    assert "How are you?" not in shipped["prompt"]
    assert own["prompt"].split("How are you?")[0] in shipped["prompt"]


def test_shipped_media(prompts: Any) -> None:
    (prompt,) = prompts("-q", "use_mixed_modalities")
    data = prompt["multi_modal_data"]
    samples, rate = data["audio"]
    assert rate == 16_000
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, soundfile.read(MEDIA / "sea.flac")[0], atol=1e-4)
    assert data["image"].mode == "RGB"
    assert data["image"].size == (336, 252)
    frames, metadata = data["video"]
    assert frames.shape == (16, 168, 224, 3)
    assert metadata["fps"] == 8
    assert len(metadata["frames_indices"]) == 16


def test_sound_of_a_video_is_its_own(prompts: Any) -> None:
    (prompt,) = prompts("-q", "use_audio_in_video")
    samples, rate = prompt["multi_modal_data"]["audio"]
    assert rate == 16_000
    assert 2.9 < len(samples) / rate < 3.2
    assert np.sqrt((samples**2).mean()) > 0.01


def test_own_recordings(recording: Path, prompts: Any) -> None:
    def lengths(*arguments: object) -> list[int]:
        (prompt,) = prompts("-q", "use_multi_audios", *arguments)
        return [len(samples) for samples, _ in prompt["multi_modal_data"]["audio"]]

    sea, tide = (soundfile.info(MEDIA / name).frames for name in ("sea.flac", "tide.flac"))
    assert lengths() == [sea, tide]
    assert lengths("-a", recording)[1] == tide
    one, two = lengths("-a", recording, "-a", recording)
    assert one == two
    assert abs(one - 16_000) < 100  # mono, and brought from 8 to 16 kHz
    (prompt,) = prompts("-q", "use_audio", "--audio-path", recording, "--sampling-rate", 8_000)
    samples, rate = prompt["multi_modal_data"]["audio"]
    assert (samples.shape, rate) == ((8_000,), 8_000)


def test_own_picture_is_brought_to_rgb(tmp_path: Path, prompts: Any) -> None:
    Image.new("RGBA", (40, 30), (255, 0, 0, 255)).save(tmp_path / "red.png")
    (prompt,) = prompts("-q", "use_image", "-i", tmp_path / "red.png")
    image = prompt["multi_modal_data"]["image"]
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (40, 30), (255, 0, 0))


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (5, 5), (1000, 24)])
def test_number_of_frames(asked: int, got: int, prompts: Any) -> None:
    (prompt,) = prompts("-q", "use_video", "-v", MEDIA / "sun.mp4", "--num-frames", asked)
    frames, _ = prompt["multi_modal_data"]["video"]
    assert len(frames) == got


@pytest.mark.parametrize(
    ("arguments", "information"),
    [
        ([], None),
        (["--speaker", "eThAn"], {"speaker": ["eThAn"]}),
        (["--seed", "0"], {"seed": [0]}),
        (["--speaker", "Ethan", "--seed", str(2**63 - 1)], {"speaker": ["Ethan"], "seed": [2**63 - 1]}),
    ],
)
def test_voice_and_seed_reach_the_prompt(
    arguments: list[str], information: dict[str, Any] | None, prompts: Any
) -> None:
    (prompt,) = prompts(*arguments)
    assert prompt.get("additional_information") == information


def test_each_query_type_in_turn(prompts: Any) -> None:
    made = prompts("-q", "use_image,text", "--num-prompts", 2)
    assert [list(prompt.get("multi_modal_data", {})) for prompt in made] == [["image"], ["image"], [], []]
    assert len({id(prompt) for prompt in made}) == 4  # vLLM-Omni may write into one


@pytest.mark.parametrize(
    ("query_type", "option"),
    [
        ("use_audio", "--audio-path"),
        ("use_image", "--image-path"),
        ("use_video", "--video-path"),
        ("use_audio_in_video", "--video-path"),
    ],
)
def test_an_unreadable_file_is_named_before_anything_starts(
    query_type: str, option: str, example: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"no media at all")
    output = tmp_path / "out"
    assert example["main"](["-q", query_type, option, str(broken), "--output-dir", str(output)]) == 2
    assert f"{broken} cannot be read as " in capfd.readouterr().err
    assert not output.exists()


def test_a_video_without_sound_is_named(
    example: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    av = pytest.importorskip("av")
    silent = tmp_path / "silent.mp4"
    with av.open(str(silent), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 64
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
        container.mux(stream.encode())
    assert example["main"](["-q", "use_audio_in_video", "-v", str(silent), "--output-dir", str(tmp_path / "out")]) == 2
    assert f"{silent} cannot be read as a video with sound" in capfd.readouterr().err


def test_table(example: dict[str, Any]) -> None:
    times = {"thinker": 1.0, "talker": 2.0, "code2wav": 0.5}
    rows = [
        {"text": "Hello", "wav": Path("a.wav"), "audio_s": 2.0, **times},
        {"text": "", "wav": None, "audio_s": 0.0, "thinker": 1.0},
    ]
    lines = example["table"](rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[1], lines[3], lines[4])]
    assert cells[0][:3] == ["text", "WAV", "audio s"]
    assert cells[1] == ["Hello", "a.wav", "2.00", "1.00", "2.00", "0.50", "1.75", "0.25"]
    assert cells[2] == ["", "-", "0.00", "1.00", "-", "-", "-", "-"]


def test_table_tells_query_types_apart(example: dict[str, Any]) -> None:
    rows = [{"text": "", "wav": None, "audio_s": 0.0, "query type": name} for name in ("text", "use_image")]
    assert "use_image" in example["table"](rows)
    assert "query type" not in example["table"](rows[:1])


def test_an_unknown_speaker_is_refused_before_the_engine_starts(
    example: dict[str, Any], qwen2_5_omni_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--speaker", "Nobody", "--model", str(qwen2_5_omni_checkpoint), "--output-dir", str(tmp_path)]
    assert example["main"](arguments) == 2
    assert "--speaker: There is no voice 'Nobody'; this checkpoint has: Chelsie, Ethan." in capsys.readouterr().err
