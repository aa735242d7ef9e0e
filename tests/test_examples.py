# SPDX-License-Identifier: Apache-2.0
"""The offline example's command line and table; the engine tests run the rest of it."""

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

EXAMPLE = Path(__file__).parents[1] / "examples/offline_inference/qwen2_5_omni/end2end.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


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
    assert args.query_type == "text"
    assert args.modalities == ["text", "audio"]
    assert args.model is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; at least 1 is needed"),
        (["--modalities", "text,vidio"], "--modalities: vidio is unknown; allowed: text, audio"),
        (["--stage-config", "missing.yaml"], "there is no file missing.yaml"),
        (["--query-type", "smell"], "invalid choice: 'smell'"),
    ],
)
def test_a_mistake_is_named(
    arguments: list[str], message: str, example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example["parse_args"](arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_own_question_stands_in_the_prompt(example: dict[str, Any]) -> None:
    prompt = example["text_query"]("How are you?")["prompt"]
    assert "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n" in prompt
    assert example["DEFAULT_QUESTION"] in example["text_query"](None)["prompt"]


def test_table(example: dict[str, Any]) -> None:
    times = {"thinker": 1.0, "talker": 2.0, "code2wav": 0.5}
    rows = [{"text": "Hello", "wav": Path("a.wav"), "audio_s": 2.0, **times}, {"text": "", "wav": None, "audio_s": 0.0}]
    table = example["table"](rows)
    for cell in ("Hello", "a.wav", "2.00", "1.75", "0.25"):
        assert cell in table
    without_sound = [cell.strip() for cell in table.splitlines()[-2].split("|")[1:-1]]
    assert without_sound == ["", "-", "0.00", "0.00", "0.00", "0.00", "-", "-"]
