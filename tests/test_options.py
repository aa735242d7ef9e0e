# SPDX-License-Identifier: Apache-2.0
"""Options are typed, and a mistake names itself and what is allowed."""

import pytest

from vllm_omni_audio_perf.options import OptionError, Token2WavOptions


@pytest.mark.parametrize(
    "additional_config", [{}, None, {"audio_perf": None}, {"audio_perf": {}}, {"audio_prefs": {"x": 1}, "perf": 1}]
)
def test_defaults(additional_config: object) -> None:
    assert Token2WavOptions.from_additional_config(additional_config) == Token2WavOptions()
    assert Token2WavOptions() == Token2WavOptions(max_mel_frames=30_000, noise="request")


@pytest.mark.parametrize("value", [0, 1, 6000])
def test_reads_a_value(value: int) -> None:
    options = Token2WavOptions.from_additional_config({"audio_perf": {"max_mel_frames": value}, "other": 1})
    assert options.max_mel_frames == value


@pytest.mark.parametrize("value", [-1, 1.5, "6000", True, None, [1]])
def test_a_value_that_is_not_allowed(value: object) -> None:
    with pytest.raises(OptionError) as error:
        Token2WavOptions.from_additional_config({"audio_perf": {"max_mel_frames": value}})
    for part in ("audio_perf.max_mel_frames", repr(value), "whole number of at least 0"):
        assert part in str(error.value)


@pytest.mark.parametrize("key", ["max_mel_frame", "MAX_MEL_FRAMES", "noise_", 3])
def test_an_unknown_option(key: object) -> None:
    with pytest.raises(OptionError) as error:
        Token2WavOptions.from_additional_config({"audio_perf": {key: 7}})
    for part in (f"audio_perf.{key}", "7", "max_mel_frames"):
        assert part in str(error.value)


@pytest.mark.parametrize("section", ["audio-perf", "audioperf", "audio_pref", "Audio_Perf", "audio_per"])
def test_a_misspelt_section(section: str) -> None:
    with pytest.raises(OptionError, match=f"'{section}'; did you mean 'audio_perf'"):
        Token2WavOptions.from_additional_config({section: {"max_mel_frames": 1}})


@pytest.mark.parametrize("section", ["text", 3, ["max_mel_frames"]])
def test_a_section_that_is_no_mapping(section: object) -> None:
    with pytest.raises(OptionError, match="allowed: a mapping of options"):
        Token2WavOptions.from_additional_config({"audio_perf": section})


@pytest.mark.parametrize("noise", ["request", "stage"])
def test_noise(noise: str) -> None:
    assert Token2WavOptions.from_additional_config({"audio_perf": {"noise": noise}}).noise == noise


@pytest.mark.parametrize("noise", ["Request", "", None, 3])
def test_noise_from_elsewhere(noise: object) -> None:
    with pytest.raises(OptionError, match=rf"audio_perf\.noise is {noise!r}; allowed: request, stage"):
        Token2WavOptions.from_additional_config({"audio_perf": {"noise": noise}})
