# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni serve` of MiMo-Audio, streamed chunk by chunk, four requests at a time, with our code2wav stage."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from capture import WINDOWS, read, read_sound
from serving import Answer, Server

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

GROUP_SIZE, ROWS, SAMPLES_PER_GROUP, SAMPLES_KEPT_BACK = 4, 8, 3840, 2400
CHUNK, LEFT_CONTEXT = 3, 40
# The first one long enough that chunks have all of the left context.
QUESTIONS = {"Say something long.": 120, "Say something.": 40, "Say another thing.": 37, "Say this.": 26}
"""Each with the most tokens of its answer."""
SAMPLING: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": 42, "repetition_penalty": 1.0}


def sampling_params(max_tokens: int) -> list[dict[str, Any]]:
    return [SAMPLING | {"max_tokens": max_tokens}, {"temperature": 0.0, "max_tokens": 200}]


class Stream:
    """One request as the talker sent it and as code2wav spoke it."""

    def __init__(self, windows: list[dict[str, Any]], sound: list[np.ndarray]) -> None:
        self.windows, self.sound = windows, sound

    @property
    def spoken(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.sound])

    def codes(self, window: dict[str, Any]) -> torch.Tensor:
        rows = torch.tensor(window["ids"]).reshape(-1, GROUP_SIZE, ROWS + 1)[..., 1:]
        return rows.reshape(-1, ROWS).T.contiguous()

    def reference(self, tokenizer: Any) -> tuple[np.ndarray, int]:
        """The same windows through upstream's tokenizer, each by itself, and the groups of the stream."""
        parts, groups = [], 0
        for window in self.windows:
            if not window["ids"]:
                continue
            codes = self.codes(window)
            waveform = tokenizer.decode(codes).reshape(-1)
            first = window["spoken"] * SAMPLES_PER_GROUP - (SAMPLES_KEPT_BACK if window["index"] else 0)
            end = len(waveform) - (0 if window["final"] else SAMPLES_KEPT_BACK)
            parts.append(waveform[first:end].numpy())
            groups += codes.shape[1] // GROUP_SIZE - window["spoken"]
        return np.concatenate([np.zeros(0, np.float32), *parts]), groups


def streams(server: Server) -> dict[str, Stream]:
    """Every request so far that had windows, by the name that the talker knows it by."""
    windows: dict[str, list[dict[str, Any]]] = {}
    for window in read(server.folder, WINDOWS):
        windows.setdefault(window["request"], []).append(window)
    sound = read_sound(server.folder)
    found = {}
    for name, own in windows.items():
        heard = [waveforms for request, waveforms in sound.items() if request.startswith(name)]
        assert len(heard) <= 1
        found[name] = Stream(own, heard[0] if heard else [])
    return found


def new_streams(server: Server, before: set[str]) -> list[Stream]:
    return [stream for name, stream in streams(server).items() if name not in before]


def ask(server: Server, question: str, **body: Any) -> Answer:
    answer = server.chat(question, sampling_params_list=sampling_params(QUESTIONS[question]), **body)
    assert answer.status == 200, answer.error
    return answer


def rel_error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


@pytest.fixture(scope="module")
def alone(mimo_audio_server: Server) -> list[Answer]:
    """The answers to `QUESTIONS`, one after the other."""
    return [ask(mimo_audio_server, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def together(mimo_audio_server: Server, alone: list[Answer]) -> list[Answer]:
    """The answers to the same, asked at the same time."""
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(lambda question: ask(mimo_audio_server, question), QUESTIONS))


@pytest.fixture(scope="module")
def tokenizer(mimo_audio_checkpoint: Any) -> Any:
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    return MiMoAudioTokenizer.from_pretrained(mimo_audio_checkpoint / "audio_tokenizer", dtype=torch.float32).eval()


def test_our_stage_serves(mimo_audio_server: Server, alone: list[Answer]) -> None:
    assert "code2wav stage: AudioPerfMiMoAudio, StreamSettings(chunk=3, left_context=40" in mimo_audio_server.log
    for answer in alone:
        assert answer.sample_rate == 24_000
        assert answer.text.strip()
        assert len(answer.waveform) % SAMPLES_PER_GROUP == 0
        assert 0.001 < np.sqrt(np.mean(answer.waveform**2)) < 0.5


def test_every_stream_is_the_windowed_decode_of_its_codes(
    mimo_audio_server: Server, alone: list[Answer], together: list[Answer], tokenizer: Any
) -> None:
    """Alone and beside others: to the sample, and without a group lost or repeated."""
    found = list(streams(mimo_audio_server).values())
    assert len(found) >= 2 * len(QUESTIONS)
    heard = [answer.waveform for answer in [*alone, *together]]
    for stream in found:
        expected, groups = stream.reference(tokenizer)
        assert len(stream.spoken) == groups * SAMPLES_PER_GROUP == len(expected)
        assert rel_error(stream.spoken, expected) <= 1e-5
        assert any(len(waveform) == len(expected) and np.abs(waveform - expected).max() < 4e-5 for waveform in heard)


def test_four_at_once_sound_as_each_alone(
    mimo_audio_server: Server, alone: list[Answer], together: list[Answer]
) -> None:
    """Where the talker, which is upstream's, made the same codes; it need not, with others in its batch."""
    by_codes: dict[str, list[Stream]] = {}
    for stream in streams(mimo_audio_server).values():
        by_codes.setdefault(repr([window["ids"] for window in stream.windows]), []).append(stream)
    compared = 0
    for first, *others in by_codes.values():
        for other in others:
            compared += len(first.spoken) > 0
            assert rel_error(other.spoken, first.spoken) <= 5e-6
    assert compared


def test_requests_share_steps(mimo_audio_server: Server, together: list[Answer]) -> None:
    steps = [np.load(path).files for path in sorted((mimo_audio_server.folder / "sound").glob("*.npz"))]
    assert max(map(len, steps)) > 1


def test_sound_comes_in_chunks_that_join(mimo_audio_server: Server, alone: list[Answer]) -> None:
    """The first one after three groups, each one as long as a chunk but the first and the last."""
    before = set(streams(mimo_audio_server))
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        events = list(
            pool.map(
                lambda text: mimo_audio_server.stream(text, sampling_params_list=sampling_params(QUESTIONS[text])),
                QUESTIONS,
            )
        )
    spoken = [stream.spoken for stream in new_streams(mimo_audio_server, before)]
    for own in events:
        chunks = [
            soundfile.read(io.BytesIO(base64.b64decode(event["choices"][0]["delta"]["content"])))[0]
            for event in own
            if event.get("modality") == "audio" and event["choices"][0]["delta"].get("content")
        ]
        lengths = [len(chunk) for chunk in chunks]
        assert lengths[0] == CHUNK * SAMPLES_PER_GROUP - SAMPLES_KEPT_BACK
        assert set(lengths[1:-1]) <= {CHUNK * SAMPLES_PER_GROUP}
        sound = np.concatenate(chunks)
        assert any(len(sound) == len(other) and np.abs(sound - other).max() < 4e-5 for other in spoken)


@pytest.mark.parametrize("groups", [1, 2, 3, 6, 7])
def test_the_end_may_be_anywhere(mimo_audio_server: Server, groups: int, tokenizer: Any) -> None:
    """Also on a chunk's boundary, where upstream's input processor says the last chunk twice."""
    before = set(streams(mimo_audio_server))
    # Five characters, five groups, and so on; what comes of the last token is not waited for.
    tokens = groups + 5 * -(-groups // 5) + 1
    answer = mimo_audio_server.chat("Say something.", sampling_params_list=sampling_params(tokens))
    assert answer.status == 200, answer.error
    (stream,) = new_streams(mimo_audio_server, before)
    expected, spoken_groups = stream.reference(tokenizer)
    assert spoken_groups == groups
    assert len(answer.waveform) == len(stream.spoken) == groups * SAMPLES_PER_GROUP
    assert rel_error(stream.spoken, expected) <= 1e-5


def test_an_answer_without_speech_ends(mimo_audio_server: Server) -> None:
    """vLLM-Omni's server says so."""
    answer = mimo_audio_server.chat("Say something.", sampling_params_list=sampling_params(3))
    assert answer.status == 400
    assert "no audio was produced" in answer.error


def test_text_alone(mimo_audio_server: Server, alone: list[Answer]) -> None:
    answer = ask(mimo_audio_server, "Say something.", modalities=["text"])
    assert answer.text.strip()
    assert answer.waveform is None


def test_clients_that_hang_up_leave_the_server_well(mimo_audio_server: Server, alone: list[Answer]) -> None:
    for seconds in (0.1, 1.0):
        mimo_audio_server.send_and_hang_up(seconds)
    assert len(ask(mimo_audio_server, "Say something.").waveform) > 0


def test_ends_clean(mimo_audio_server: Server) -> None:
    """Last in the file: Ctrl-C ends all processes."""
    assert len(mimo_audio_server.processes()) >= 3
    assert mimo_audio_server.interrupt() == 0
    assert not mimo_audio_server.processes_after_the_end()
