# SPDX-License-Identifier: Apache-2.0
"""The prompts of the query types, in the words that MiMo-Audio was trained on. The types have upstream's names."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# One for each item of `multi_modal_data`, in the same order. vLLM-Omni puts as many <|empty|> as there are groups.
AUDIO = "<|sosp|><|empty|><|eosp|>"

# What follows the assistant's name decides on the kind of the answer.
SPEAK = "<|sostm|>"
THINK = "<think>\n"
WRITE = "<think>\n\n</think>\n"

# The system prompts and the request to read aloud, in the words of the training data.
STYLE = "你需要根据指定的风格指令和文本内容来生成语音。"
VOICE = "你需要根据指定的风格指令和文本内容来生成和语音prompt具有相同音色的语音。你的音色应该是："  # noqa: RUF001
DIALOGUE_VOICE = "Your voice should be:"
READ_ALOUD = {"zh": "请将这段文字转换为语音", "en": "Please convert this text to speech"}

SAMPLE_RATE = 24_000  # Hz
GROUP_SECONDS = 0.16
INTERLEAVED = 5  # tokens, then groups, in turn

SHIPPED_MEDIA = Path(__file__).resolve().parents[2] / "media"
SEA = SHIPPED_MEDIA / "sea.flac"  # "What do you hear when you stand by the sea?"
TIDE = SHIPPED_MEDIA / "tide.flac"  # "The tide comes in at half past seven."

Prompt = dict[str, Any]


class PromptError(Exception):
    """A prompt cannot be made or answered; the message says why."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        text: of the user; None for the query type's own.
        instruct: how to speak; None for the example's own.
        recordings: the user's, in the order in which the prompt has them. Missing ones are the repository's.
    """

    text: str | None = None
    instruct: str | None = None
    recordings: tuple[Path, ...] = ()

    def load(self, *shipped: Path) -> list[Any]:
        """The recordings in the order of the prompt, given the repository's."""
        return [load_audio(path) for path in (*self.recordings, *shipped[len(self.recordings) :])]


def tts_sft(request: Request) -> Prompt:
    """Read a text aloud."""
    return _prompt(_read_aloud(request), SPEAK)


def tts_sft_with_instruct(request: Request) -> Prompt:
    """Read a text aloud in a given style."""
    style = request.instruct or "Whisper, as if it were a secret"
    return _prompt(_turn("system", STYLE) + _read_aloud(request, f"({style})"), THINK)


def tts_sft_with_audio(request: Request) -> Prompt:
    """Read a text aloud with the voice of a recording."""
    return _prompt(_turn("system", VOICE + AUDIO) + _read_aloud(request), SPEAK, request.load(TIDE))


def tts_sft_with_natural_instruction(request: Request) -> Prompt:
    """Speak as a sentence that holds both the words and the style says."""
    text = request.text or "In an old man's tired voice, he said: let me sit down for a moment."
    return _prompt(_turn("system", STYLE) + _turn("user", _capitalized(text)), THINK)


def audio_trancribing_sft(request: Request) -> Prompt:
    """Repeat a recording, in writing and aloud. Upstream spells it like this."""
    text = request.text or "Please transcribe this audio and repeat it once."
    return _prompt(_turn("user", AUDIO + text), SPEAK, request.load(SEA))


def audio_understanding_sft(request: Request) -> Prompt:
    """Answer a question about a recording in writing."""
    return _about_a_recording(request, WRITE)


def audio_understanding_sft_with_thinking(request: Request) -> Prompt:
    """Answer a question about a recording in writing, after some thought."""
    return _about_a_recording(request, THINK)


def spoken_dialogue_sft_multiturn(request: Request) -> Prompt:
    """Answer a recording aloud, after an earlier question and answer."""
    answered = request.text or "At half past seven."  # short enough for one token a character, see below
    return _prompt(
        _turn("system", DIALOGUE_VOICE + AUDIO)
        + _turn("user", AUDIO)
        + _turn("assistant", f"<|sostm|>{answered}<|eot|><|empty|><|eostm|>")
        + _turn("user", AUDIO),
        SPEAK,
        request.load(TIDE, SEA, TIDE, SEA),
    )


def speech2text_dialogue_sft_multiturn(request: Request) -> Prompt:
    """Answer a recording in writing and after some thought, after an earlier question and answer."""
    answered = request.text or "I hear waves and gulls. Do you know when the tide comes in?"
    turns = _turn("user", AUDIO) + _turn("assistant", answered) + _turn("user", AUDIO)
    return _prompt(turns, THINK, request.load(SEA, TIDE))


def text_dialogue_sft_multiturn(request: Request) -> Prompt:
    """Answer in writing, after an earlier question and answer."""
    return _prompt(
        _turn("user", "I would like to spend a week by the sea. Where should I go?")
        + _turn("assistant", "Do you prefer cliffs or sand?")
        + _turn("user", request.text or "Cliffs, and not too many people."),
        WRITE,
    )


def check_earlier_answer(prompt: Prompt, count_tokens: Callable[[str], int]) -> None:
    """Refuse an earlier spoken answer with too many words for its recording: they stop vLLM-Omni 0.30.0's engine.

    It inserts five groups after each five tokens but the last, and takes them from those of the recording.

    Raises:
        PromptError: there are more tokens than that.
    """
    match = re.search(r"<\|sostm\|>(.+)<\|eot\|>", prompt["prompt"], re.DOTALL)
    if match is None:
        return
    tokens = count_tokens(match[1])
    samples, _ = prompt["multi_modal_data"]["audio"][prompt["prompt"].count("<|empty|>", 0, match.start())]
    groups = int(len(samples) / SAMPLE_RATE / GROUP_SECONDS)
    if (tokens - 1) // INTERLEAVED * INTERLEAVED > groups:
        most = (groups // INTERLEAVED + 1) * INTERLEAVED
        raise PromptError(
            f"--text: the assistant's earlier answer has {tokens} tokens; with a recording of "
            f"{groups * GROUP_SECONDS:.2f} s it may have {most}. It has to say what the recording says"
        )


class QueryType(NamedTuple):
    """How to make a prompt.

    Attributes:
        make: makes it.
        recordings: how many recordings it has.
        speaks: whether the answer is speech, too.
    """

    make: Callable[[Request], Prompt]
    recordings: int
    speaks: bool


QUERY_TYPES = {
    "tts_sft": QueryType(tts_sft, 0, True),
    "tts_sft_with_instruct": QueryType(tts_sft_with_instruct, 0, True),
    "tts_sft_with_audio": QueryType(tts_sft_with_audio, 1, True),
    "tts_sft_with_natural_instruction": QueryType(tts_sft_with_natural_instruction, 0, True),
    "audio_trancribing_sft": QueryType(audio_trancribing_sft, 1, True),
    "audio_understanding_sft": QueryType(audio_understanding_sft, 1, False),
    "audio_understanding_sft_with_thinking": QueryType(audio_understanding_sft_with_thinking, 1, False),
    "spoken_dialogue_sft_multiturn": QueryType(spoken_dialogue_sft_multiturn, 4, True),
    "speech2text_dialogue_sft_multiturn": QueryType(speech2text_dialogue_sft_multiturn, 2, False),
    "text_dialogue_sft_multiturn": QueryType(text_dialogue_sft_multiturn, 0, False),
}


def load_audio(path: Path) -> Any:
    """The mono waveform (samples,), float32, and its rate."""
    from vllm.multimodal.media.audio import load_audio as load

    with _named(path, "audio"):
        return load(path, sr=SAMPLE_RATE)


@contextmanager
def _named(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a decoder raises into an error that names the file."""
    try:
        yield
    except Exception as error:
        raise PromptError(f"{path} cannot be read as {kind}: {error}") from error


def _about_a_recording(request: Request, answer: str) -> Prompt:
    return _prompt(_turn("user", AUDIO + (request.text or "What is the voice asking?")), answer, request.load(SEA))


def _read_aloud(request: Request, style: str = "") -> str:
    text = request.text or "The weather is so nice today."
    language = "zh" if re.search("[\u4e00-\u9fff]", text) else "en"
    return _turn("user", f"{READ_ALOUD[language]}: {_capitalized(text)}{style}")


def _capitalized(text: str) -> str:
    """The text like a sentence, if it is all in small or all in capital letters."""
    return text.capitalize() if text.isupper() or text.islower() else text


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _prompt(turns: str, answer: str, recordings: list[Any] | None = None) -> Prompt:
    prompt: Prompt = {"prompt": f"{turns}<|im_start|>assistant\n{answer}"}
    return prompt | {"multi_modal_data": {"audio": recordings}} if recordings else prompt
