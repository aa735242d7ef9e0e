# SPDX-License-Identifier: Apache-2.0
"""Voice and seed of a request: read, checked and carried."""

import pytest

from vllm_omni_audio_perf.qwen2_5_omni.request_settings import RequestError, RequestSettings
from vllm_omni_audio_perf.scheduling.offline import EMPTY_ON_ERROR

VOICES = ("Chelsie", "Ethan")


def prompt(**information: object) -> dict[str, object]:
    return {"prompt": "Hello", "additional_information": information}


@pytest.mark.parametrize("asks_for_nothing", ["Hello", {"prompt": "Hello"}, None, prompt(), prompt(other=[1])])
def test_defaults(asks_for_nothing: object) -> None:
    assert RequestSettings.from_prompt(asks_for_nothing, VOICES) == RequestSettings()


@pytest.mark.parametrize("name", ["Ethan", "ethan", "ETHAN", " Ethan "])
@pytest.mark.parametrize("listed", [True, False])
def test_a_voice_in_any_case_is_the_checkpoints(name: str, listed: bool) -> None:
    assert RequestSettings.from_prompt(prompt(speaker=[name] if listed else name), VOICES).voice == "Ethan"


@pytest.mark.parametrize("name", ["Nobody", "Etha", 5, ["Ethan", "Chelsie"]])
def test_an_unknown_voice_is_refused_with_those_there_are(name: object) -> None:
    with pytest.raises(RequestError, match=r"There is no voice .*; this checkpoint has: Chelsie, Ethan\."):
        RequestSettings.from_prompt(prompt(speaker=name), VOICES)


@pytest.mark.parametrize("empty", [None, "", "  ", [None]])
def test_no_voice_is_the_default_one(empty: object) -> None:
    assert RequestSettings.from_prompt(prompt(speaker=empty), VOICES).voice is None


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_reads_a_seed(seed: int) -> None:
    assert RequestSettings.from_prompt(prompt(seed=[seed]), VOICES).seed == seed


@pytest.mark.parametrize("seed", [1.5, "7", True, 2**63, -(2**63) - 1, [1, 2]])
def test_a_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(RequestError, match=r"seed is .*; allowed: a whole number from -9223372036854775808 to"):
        RequestSettings.from_prompt(prompt(seed=seed), VOICES)


@pytest.mark.parametrize(
    "settings",
    [RequestSettings(), RequestSettings(voice="Ethan", seed=7, empty_on_error=True), RequestSettings(seed=0)],
)
def test_survives_the_way_to_the_stage(settings: RequestSettings) -> None:
    """Through vLLM's own message format, as the engine sends it."""
    msgspec = pytest.importorskip("msgspec")
    buffer = msgspec.msgpack.decode(msgspec.msgpack.encode(settings.to_buffer()))
    assert RequestSettings.from_buffer(buffer | {"codes": {"audio": [1]}}) == settings


@pytest.mark.parametrize("buffer", [None, {}, {"codes": {"audio": [1]}}, [1]])
def test_a_buffer_without_settings(buffer: object) -> None:
    assert RequestSettings.from_buffer(buffer) == RequestSettings()


def test_reads_how_a_failed_request_ends() -> None:
    assert RequestSettings.from_prompt(prompt(**{EMPTY_ON_ERROR: [True]}), VOICES).empty_on_error
