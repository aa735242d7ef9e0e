# SPDX-License-Identifier: Apache-2.0
"""Options are typed, and a mistake names itself and what is allowed."""

import dataclasses

import pytest

from vllm_omni_audio_perf.options import SOLVERS, MiMoAudioOptions, OptionError, StageOptions, Token2WavOptions


@pytest.mark.parametrize(
    "additional_config", [{}, None, {"audio_perf": None}, {"audio_perf": {}}, {"audio_prefs": {"x": 1}, "perf": 1}]
)
def test_defaults(additional_config: object) -> None:
    assert Token2WavOptions.from_additional_config(additional_config) == Token2WavOptions()
    assert Token2WavOptions() == Token2WavOptions(max_mel_frames=30_000, noise="request")


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


# Allowed values of each option, and values that are not, with what the error says is allowed.
WHOLE = "a whole number of at least {}"
CHOICES: dict[type[StageOptions], dict[str, tuple[list[object], list[object], str]]] = {
    Token2WavOptions: {
        "max_mel_frames": ([0, 6000], [-1, 1.5, "6000", True, None, [1]], WHOLE.format(0)),
        "noise": (["request", "stage"], ["Request", "", None, 3], "request, stage"),
        "num_steps": ([2, 10, 100], [1, 0, 2.0, "10", True], WHOLE.format(2)),
        "solver": (["rk4", "midpoint", "euler"], ["RK4", "heun", None, 4], "rk4, midpoint, euler"),
        "dit_dtype": (["float32", "bfloat16"], ["float16", "bf16", None, 16], "float32, bfloat16"),
        "frames_per_solve": ([1, 16_000], [0, -1, 1.0, "1", False], WHOLE.format(1)),
        "group_memory_mib": ([1, 1024], [0, 0.5, None], WHOLE.format(1)),
        "vocoder_frames": ([1, 1000], [0, 0.5, None], WHOLE.format(1)),
        "cuda_graphs": ([True, False], [1, 0, "true", None], "true, false"),
        "graph_mel_frames": ([1, 600], [0, 0.5, None, 60_001], WHOLE.format(1) + " and at most 60000"),
        "graph_seconds": ([1, 120], [0, 0.5, None], WHOLE.format(1)),
        "graph_memory_mib": ([1, 2048], [0, 0.5, None], WHOLE.format(1)),
    },
    MiMoAudioOptions: {
        "cuda_graphs": ([True, False], [1, 0, "true", None], "true, false"),
        "graph_seconds": ([1, 120], [0, 0.5, None], WHOLE.format(1)),
        "graph_memory_mib": ([1, 2048], [0, 0.5, None], WHOLE.format(1)),
        "flash_attention": ([True, False], [1, 0, "true", None], "true, false"),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, options in CHOICES.items() for name in options])
def test_each_option(kind: type[StageOptions], name: str) -> None:
    allowed, refused, words = CHOICES[kind][name]
    for value in allowed:
        options = kind.from_additional_config({"audio_perf": {name: value}, "other": 1})
        assert getattr(options, name) == value
    for value in refused:
        with pytest.raises(OptionError) as error:
            kind.from_additional_config({"audio_perf": {name: value}})
        assert str(error.value) == f"audio_perf.{name} is {value!r}; allowed: {words}."


@pytest.mark.parametrize("kind", CHOICES)
def test_every_option_is_tested(kind: type[StageOptions]) -> None:
    assert list(CHOICES[kind]) == [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]


def test_solvers_are_those_there_are() -> None:
    """Options know no torch, so that their list is a copy."""
    from vllm_omni_audio_perf.token2wav.solver import SOLVERS as THERE_ARE

    assert SOLVERS == THERE_ARE
