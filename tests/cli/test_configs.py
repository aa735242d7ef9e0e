# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf configs` and the index behind it."""

from pathlib import Path

import pytest

from vllm_omni_audio_perf import stage_configs_index
from vllm_omni_audio_perf.cli import main
from vllm_omni_audio_perf.stage_configs_index import list_stage_configs, stage_config_path

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index over a folder with three YAMLs and one other file."""
    (tmp_path / "tts.yaml").write_text(
        "# SPDX-License-Identifier: Apache-2.0\n\n# Speech, one stage.\n# More.\nstages: []\n"
    )
    (tmp_path / "chat_long_name.yaml").write_text("# Chat.\nstages: []\n")
    (tmp_path / "bare.yaml").write_text("stages: []\n")
    (tmp_path / "notes.txt").write_text("# Not a stage config.\n")
    monkeypatch.setattr(stage_configs_index, "_FOLDER", tmp_path)
    return tmp_path


def test_lists_each_yaml_with_its_first_comment_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_stage_configs() == [("bare", ""), ("chat_long_name", "Chat."), ("tts", "Speech, one stage.")]

    assert main(["configs"]) == 0
    assert capsys.readouterr().out == "bare\nchat_long_name  Chat.\ntts             Speech, one stage.\n"


@pytest.mark.parametrize("name", ["tts", "tts.yaml"])
def test_prints_only_the_path_of_a_name(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage_config_path(name) == folder / "tts.yaml"

    assert main(["configs", name]) == 0
    assert capsys.readouterr() == (f"{folder / 'tts.yaml'}\n", "")


@pytest.mark.parametrize("name", ["tss", "", "notes.txt", "../tts", "tts.yml"])
def test_an_unknown_name_is_refused_with_the_valid_ones(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="bare, chat_long_name, tts"):
        stage_config_path(name)

    assert main(["configs", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert repr(name) in err
    assert "bare, chat_long_name, tts" in err


def test_the_installed_stage_configs_are_those_of_the_repository() -> None:
    files = sorted((REPOSITORY / "stage_configs").glob("*.yaml"))

    assert files
    assert [stage_config_path(name) for name, _ in list_stage_configs()] == files


def test_every_installed_stage_config_says_what_it_is() -> None:
    assert [name for name, description in list_stage_configs() if not description] == []
