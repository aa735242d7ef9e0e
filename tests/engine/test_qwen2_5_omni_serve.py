# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni serve` with our stages: every kind of request, good ones beside bad ones, and a clean end."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
from capture import CODES, STEPS, read
from serving import CODES_A_STEP, Answer, Server, sampling_params

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

STAGES = 3
NO_CODE = 8250  # an id that the talker has and the codebook has not
BAD_CODES = sampling_params({}, {"allowed_token_ids": [NO_CODE], "max_tokens": 5}, {})
BAD_CODES_ERROR = "code 8250 at position 0 of 5 is not in the codebook; allowed: 0 to 8193."


def same_sound(*answers: Answer) -> bool:
    """But for the last bit of a sample: products of other sizes are rounded otherwise."""
    first = answers[0].waveform
    return all(
        len(answer.waveform) == len(first) and np.allclose(answer.waveform, first, rtol=0, atol=1.5 / 2**15)
        for answer in answers
    )


@pytest.fixture(scope="module")
def plain(server: Server) -> Answer:
    """The answer to a request that asks for nothing in particular."""
    answer = server.chat()
    assert answer.status == 200, answer.error
    return answer


def test_text_and_audio(server: Server, plain: Answer) -> None:
    assert plain.text.strip()
    assert plain.text.isprintable()
    assert plain.sample_rate == 24_000
    assert len(plain.waveform) > 0
    assert len(plain.waveform) % 480 == 0
    assert "code2wav stage: AudioPerfQwen2_5Omni" in server.log


def test_the_same_request_sounds_the_same(server: Server, plain: Answer) -> None:
    assert same_sound(plain, server.chat())


def test_seed_of_the_body(server: Server, plain: Answer) -> None:
    seven, again, eight = server.chat(seed=7), server.chat(seed=7), server.chat(seed=8)
    assert same_sound(seven, again)
    assert not same_sound(seven, eight)
    assert not same_sound(seven, plain)
    assert len(seven.waveform) == len(plain.waveform)  # the codes are the same


def test_seed_of_the_stages_sampling_parameters(server: Server) -> None:
    usual, again, another = (
        server.chat(sampling_params_list=sampling_params({}, {}, {"seed": seed})) for seed in (42, 42, 9)
    )
    assert same_sound(usual, again)
    assert not same_sound(usual, another)


@pytest.mark.parametrize(
    "body", [{"voice": "ETHAN"}, {"speaker": "ethan"}, {"audio": {"voice": "Ethan", "format": "wav"}}]
)
def test_voice(server: Server, plain: Answer, body: dict) -> None:
    answer = server.chat(**body)
    assert answer.status == 200, answer.error
    assert not same_sound(answer, plain)
    assert same_sound(answer, server.chat(voice="Ethan"))


def test_the_talker_heeds_the_voice(server: Server) -> None:
    def codes(voice: str) -> list[int]:
        server.chat(voice=voice)
        return read(server.folder, CODES)[-1]

    chelsie, ethan, again = codes("Chelsie"), codes("Ethan"), codes("Chelsie")
    assert chelsie == again
    assert chelsie != ethan


def test_the_default_voice_by_name(server: Server, plain: Answer) -> None:
    assert same_sound(server.chat(voice="chelsie"), plain)


@pytest.mark.parametrize("body", [{"voice": "alloy"}, {"audio": {"voice": "alloy", "format": "wav"}}])
def test_an_unknown_voice_is_refused(server: Server, body: dict) -> None:
    answer = server.chat(**body)
    assert answer.status == 400
    assert "There is no voice 'alloy'; this checkpoint has: Chelsie, Ethan." in answer.error


NO_TOKEN = {"allowed_token_ids": [999_999_999]}


@pytest.mark.parametrize(
    "body",
    [
        {"seed": "x"},
        {"seed": 2**70},
        {"modalities": ["smell"]},
        {"sampling_params_list": sampling_params({}, NO_TOKEN, {})},
        {"sampling_params_list": sampling_params({}, {}, NO_TOKEN)},
        {"additional_information": {"speaker": ["alloy"]}},
        {"text": "x" * 4038},  # the thinker has room for it, the talker has not
    ],
    ids=["seed", "large seed", "modality", "talker's tokens", "code2wav's tokens", "information", "long prompt"],
)
def test_a_request_that_cannot_be_served_is_refused(server: Server, body: dict, plain: Answer) -> None:
    """Some of these end a stage of stock vLLM-Omni."""
    answer = server.chat(**body)
    assert answer.status == 400, answer
    assert same_sound(server.chat(), plain)


def test_text_only(server: Server, plain: Answer) -> None:
    answer = server.chat(modalities=["text"])
    assert answer.text == plain.text
    assert answer.waveform is None


def test_streamed_text(server: Server, plain: Answer) -> None:
    events = server.stream(modalities=["text"])
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert sum(bool(piece) for piece in pieces) > 1
    assert "".join(pieces) == plain.text


def test_streamed_text_and_audio(server: Server, plain: Answer) -> None:
    events = server.stream()
    sounds = [event["choices"][0]["delta"]["content"] for event in events if event.get("modality") == "audio"]
    (sound,) = [sound for sound in sounds if sound]
    waveform, sample_rate = soundfile.read(io.BytesIO(base64.b64decode(sound)))
    assert sample_rate == 24_000
    assert np.array_equal(waveform, plain.waveform)


def test_bad_requests_between_good_ones(server: Server) -> None:
    """All at once; each good one sounds as it does alone.

    Where the talker, which is upstream's, made the same codes; it need not, with others in its batch.
    """
    before = len(read(server.folder, CODES))
    bodies = [{"text": f"Say {number}.", "seed": number} for number in range(6)]
    sent = [*bodies[:2], {"sampling_params_list": BAD_CODES}, *bodies[2:4], {"voice": "alloy"}, *bodies[4:]]
    with ThreadPoolExecutor(len(sent)) as pool:
        answers = list(pool.map(lambda body: server.chat(**body), sent))
    assert [answer.status for answer in answers] == [200, 200, 500, 200, 200, 400, 200, 200]
    assert BAD_CODES_ERROR in answers[2].error
    together = [answer for answer in answers if answer.status == 200]
    codes_together = read(server.folder, CODES)[before:]
    steps = read(server.folder, STEPS)
    assert max(len(counts) for counts in steps) > 1  # else they were not together
    assert any(sum(counts) == CODES_A_STEP for counts in steps)  # one was cut, or nothing shows that it may be
    compared = 0
    for body, answer in zip(bodies, together, strict=True):
        alone = server.chat(**body)
        assert answer.text == alone.text
        if read(server.folder, CODES)[-1] in codes_together:
            assert same_sound(answer, alone)
            compared += 1
    assert compared >= 3
    assert "of 5 codes failed: " + BAD_CODES_ERROR in server.log


def test_a_failed_request_in_a_stream(server: Server) -> None:
    events = server.stream(sampling_params_list=BAD_CODES)
    assert BAD_CODES_ERROR in str(events[-1])


def test_no_codes_are_empty_audio(server: Server, plain: Answer) -> None:
    answer = server.chat(sampling_params_list=sampling_params({}, {"allowed_token_ids": [8294]}, {}))
    assert answer.status == 200, answer.error
    assert len(answer.waveform) == 0
    assert answer.text


def test_one_code(server: Server) -> None:
    answer = server.chat(sampling_params_list=sampling_params({}, {"max_tokens": 1}, {}))
    assert len(answer.waveform) == 480


def test_an_empty_answer_of_the_thinker_is_empty_audio(server: Server, plain: Answer) -> None:
    end_of_turn = 151645
    answer = server.chat(sampling_params_list=sampling_params({"allowed_token_ids": [end_of_turn]}, {}, {}))
    assert answer.status == 200, answer.error
    assert not answer.text
    assert len(answer.waveform) == 0
    assert same_sound(server.chat(), plain)


def test_an_answer_that_upstream_takes_for_empty(server: Server, plain: Answer) -> None:
    """One end token that ends nothing: upstream drops it on the way to the talker."""
    thinker = {"allowed_token_ids": [151645], "ignore_eos": True, "max_tokens": 1}
    assert server.chat(sampling_params_list=sampling_params(thinker, {}, {})).status == 200
    assert same_sound(server.chat(), plain)


def test_a_talker_without_penalties(server: Server, plain: Answer) -> None:
    """Stock's dies of it."""
    without = sampling_params({}, {"repetition_penalty": 1.0}, {})
    assert len(server.chat(sampling_params_list=without).waveform) > 0
    assert same_sound(server.chat(), plain)


def test_clients_that_hang_up(server: Server, plain: Answer) -> None:
    aborted = server.log.count("Aborted request(s)")
    for seconds in (0.3, 0.6, 1.0):
        server.send_and_hang_up(seconds)
    assert same_sound(server.chat(), plain)
    assert server.log.count("Aborted request(s)") > aborted


def test_ends_on_ctrl_c(server: Server) -> None:
    """Stays the last one: the server is gone then."""
    assert len(server.processes()) >= 1 + STAGES  # so that the check below sees them
    assert server.interrupt() == 0
    assert not server.processes_after_the_end()
