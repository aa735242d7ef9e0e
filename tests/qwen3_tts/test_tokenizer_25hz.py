# SPDX-License-Identifier: Apache-2.0
"""The decoder of Qwen3-TTS's 25 Hz tokenizer against upstream's, on the same weights, noise and codes."""

import copy
import subprocess
import sys
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from parity import CODE_COUNTS, MAX_REL_ERROR, evaluate_upstream, other_voice, random_codes, rel_error
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_omni_audio_perf.qwen3_tts import Tokenizer25HzDecoder
from vllm_omni_audio_perf.token2wav import BlockDiT, Clip
from vllm_omni_audio_perf.token2wav.vocoder import vocode

UPSTREAM_NOISE_FRAMES = 30_000  # upstream draws noise for this length and cuts it
HOP = 240
COUNTS = (30, 2, 25, 1, 48, 7, 11, 12)
TIME = torch.tensor(0.3)

Voice = tuple[Tensor, Tensor]


def upstream_noise(frames: int) -> Tensor:
    """What upstream draws after ``torch.manual_seed(3)`` for a batch of one: ``[frames, 80]``."""
    torch.manual_seed(3)
    return torch.randn(1, UPSTREAM_NOISE_FRAMES, 80)[0, :frames]


def noise_of(index: int, frames: int) -> Tensor:
    return torch.randn(frames, 80, generator=torch.Generator().manual_seed(100 + index))


def voice_of(index: int, reference_frames: int) -> Voice:
    speaker, reference_mel = other_voice(index, reference_frames)
    return speaker[0], reference_mel[0]


def clip_of(codes: Tensor, voice: Voice, noise: Tensor) -> Clip:
    return Clip(codes, voice[0].unsqueeze(0), voice[1].unsqueeze(0), noise.unsqueeze(0))


@torch.inference_mode()
def decode_upstream(
    theirs: Any, codes: list[Tensor], voices: list[Voice], noises: list[Tensor], **settings: Any
) -> list[Tensor]:
    """Upstream's waveforms of a batch, padded as its tokenizer pads and cut to the samples of each sequence's codes.

    The noise stands for what upstream draws.
    """
    speakers, references = zip(*voices, strict=True)
    drawn = pad_sequence(noises, batch_first=True)
    with patch.object(torch, "randn", return_value=drawn):
        waveforms = theirs(
            code=pad_sequence(codes, batch_first=True),
            conditioning=torch.stack(speakers),
            reference_mel=pad_sequence(list(references), batch_first=True),
            **settings,
        )
    repeats = theirs.dit.repeats
    return [waveform[: len(ids) * repeats * HOP] for waveform, ids in zip(waveforms, codes, strict=True)]


def decode_each_alone(
    theirs: Any, codes: list[Tensor], voices: list[Voice], noises: list[Tensor], **settings: Any
) -> list[Tensor]:
    return [
        decode_upstream(theirs, [ids], [voice], [noise], **settings)[0]
        for ids, voice, noise in zip(codes, voices, noises, strict=True)
    ]


def decode_ours(
    decoder: Tokenizer25HzDecoder, codes: list[Tensor], voices: list[Voice], noises: list[Tensor]
) -> list[Tensor]:
    speakers, references = zip(*voices, strict=True)
    return decoder.decode(codes, speakers, references, noises=noises)


def error_of_one_evaluation(theirs: Any, codes: int, voice: Voice, rotary_heads: int | None) -> float:
    dit = BlockDiT(theirs.dit, rotary_heads=rotary_heads)
    clip = clip_of(random_codes(codes), voice, noise_of(0, codes * theirs.dit.repeats))
    layout = dit.layout([clip.noise.shape[1]], guided=True)
    with torch.inference_mode():
        expected = evaluate_upstream(theirs.dit, clip, TIME)
        conditions = dit.conditions(layout, [dit.voice(clip.speaker, clip.reference_mel)], [clip.codes], guided=True)
        modulation = dit.modulation_table(TIME.reshape(1)).at(0)
        out = dit.evaluate(layout.pack([clip.noise[0]]), modulation, conditions, layout.groups)
    return rel_error(torch.stack([layout.unpack(copy)[0] for copy in out.chunk(2)]), expected)


# ---------------------------------------------------------------------------------------------------- batches of one


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_one_evaluation_equals_upstream(codes: int, theirs: Any, voice: Voice) -> None:
    assert error_of_one_evaluation(theirs, codes, voice, rotary_heads=None) <= 1e-6


def test_the_rotary_embedding_is_of_all_heads(theirs: Any, voice: Voice) -> None:
    assert error_of_one_evaluation(theirs, 37, voice, rotary_heads=1) > 1e-4
    assert Tokenizer25HzDecoder(theirs).sampler.dit.rotary_heads is None


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_mel_and_waveform_equal_upstream(codes: int, theirs: Any, voice: Voice) -> None:
    ids = random_codes(codes)
    speaker, reference_mel = voice
    with torch.inference_mode():
        torch.manual_seed(3)
        expected_mel = theirs.dit.sample(speaker.unsqueeze(0), reference_mel.unsqueeze(0), ids.unsqueeze(0))
        torch.manual_seed(3)
        expected = theirs(ids.unsqueeze(0), speaker.unsqueeze(0), reference_mel.unsqueeze(0))[0]
    ours, noise = Tokenizer25HzDecoder(theirs), upstream_noise(2 * codes)
    (mel,) = ours.sampler.sample([clip_of(ids, voice, noise)])
    (waveform,) = ours.decode([ids], [speaker], [reference_mel], noises=[noise])
    assert mel.shape == expected_mel.shape
    assert rel_error(mel, expected_mel) <= MAX_REL_ERROR
    assert waveform.shape == (2 * HOP * codes,)
    assert waveform.dtype == torch.float32
    assert waveform.device.type == "cpu"
    assert waveform.abs().max() < 1  # else clipping would hide differences
    assert rel_error(waveform, expected) <= MAX_REL_ERROR


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_four_frames_a_code_equal_upstream(codes: int, theirs_of_4_repeats: Any, voice: Voice) -> None:
    given = [random_codes(codes)], [voice], [noise_of(0, 4 * codes)]
    (waveform,) = decode_ours(Tokenizer25HzDecoder(theirs_of_4_repeats), *given)
    assert waveform.shape == (4 * HOP * codes,)
    assert rel_error(waveform, decode_each_alone(theirs_of_4_repeats, *given)[0]) <= MAX_REL_ERROR


@pytest.mark.parametrize("sway_coefficient", [None, -0.5])
@pytest.mark.parametrize("guidance_scale", [1e-5, 2.0])
@pytest.mark.parametrize("num_steps", [2, 5, 17])
def test_settings_equal_upstream(
    num_steps: int, guidance_scale: float, sway_coefficient: float | None, theirs: Any, voice: Voice
) -> None:
    settings = {"num_steps": num_steps, "guidance_scale": guidance_scale, "sway_coefficient": sway_coefficient}
    given = [random_codes(17)], [voice], [noise_of(0, 34)]
    (waveform,) = decode_ours(Tokenizer25HzDecoder(theirs, **settings), *given)
    assert rel_error(waveform, decode_each_alone(theirs, *given, **settings)[0]) <= MAX_REL_ERROR


def test_without_guidance_the_conditional_velocity_is_followed(theirs: Any, voice: Voice) -> None:
    """Where upstream fails: its doubled batch does not fit the voice at the second evaluation."""
    ids, noise = random_codes(17), noise_of(0, 34)
    clip = clip_of(ids, voice, noise)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        decode_upstream(theirs, [ids], [voice], [noise], guidance_scale=0.0)
    times = torch.linspace(0, 1, 5)
    with torch.inference_mode():
        for start, stop in pairwise(times):
            velocity = evaluate_upstream(theirs.dit, clip, start)[:1]
            clip = clip._replace(noise=clip.noise + velocity * (stop - start))
        expected = theirs.bigvgan(clip.noise.mT)[0]
    ours = Tokenizer25HzDecoder(theirs, num_steps=5, guidance_scale=0.0, sway_coefficient=None)
    assert rel_error(decode_ours(ours, [ids], [voice], [noise])[0], expected) <= MAX_REL_ERROR


def test_a_solve_evaluates_nine_times(theirs: Any, voice: Voice, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Tokenizer25HzDecoder(theirs)
    evaluated: list[torch.Size] = []
    evaluate = ours.sampler.dit.evaluate

    def counting(mel: Tensor, *args: Any) -> Tensor:
        evaluated.append(mel.shape)
        return evaluate(mel, *args)

    monkeypatch.setattr(ours.sampler.dit, "evaluate", counting)
    ours.decode([random_codes(13), random_codes(5)], [voice[0]] * 2, [voice[1]] * 2)
    assert evaluated == [(2 + 1, 24, 80)] * 9  # the blocks of both


def test_the_vocoder_in_pieces_equals_the_whole(theirs: Any, voice: Voice) -> None:
    """Its convolutions look back further than those of Qwen2.5-Omni: 20 frames of overlap are not enough."""
    given = [random_codes(150)], [voice], [noise_of(0, 300)]
    whole = decode_ours(Tokenizer25HzDecoder(theirs, vocoder_frames=300), *given)
    assert rel_error(whole[0], decode_each_alone(theirs, *given)[0]) <= MAX_REL_ERROR
    for frames in (100, 47):
        pieces = decode_ours(Tokenizer25HzDecoder(theirs, vocoder_frames=frames), *given)
        assert pieces[0].shape == whole[0].shape
        assert 0 < rel_error(pieces[0], whole[0]) <= 1e-6
    mel = torch.randn(1, 80, 300, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        error = rel_error(vocode(theirs.bigvgan, mel, piece_frames=100), theirs.bigvgan(mel)[0])
    assert error > 1e-4


# -------------------------------------------------------------------------------------------------- batches of several


@pytest.mark.parametrize("frames_per_solve", [1, 100, 16_000])
@pytest.mark.parametrize("counts", [(12, 24), (1, 1, 1), (61, 5, 37, 12), (13, 120), COUNTS])
def test_each_of_several_equals_upstreams_single_run(
    counts: tuple[int, ...], frames_per_solve: int, theirs: Any
) -> None:
    """Of voices whose references differ in length, too; solved together or not."""
    codes = [random_codes(count) for count in counts]
    voices = [voice_of(index, 90 + 20 * index) for index in range(len(counts))]
    noises = [noise_of(index, 2 * count) for index, count in enumerate(counts)]
    waveforms = decode_ours(Tokenizer25HzDecoder(theirs, frames_per_solve=frames_per_solve), codes, voices, noises)
    for waveform, expected in zip(waveforms, decode_each_alone(theirs, codes, voices, noises), strict=True):
        assert waveform.shape == expected.shape
        assert rel_error(waveform, expected) <= MAX_REL_ERROR


@pytest.mark.parametrize(
    ("counts", "references", "differ"),
    [
        ((37, 37), (150, 150), set()),
        ((13, 37), (150, 150), {0}),  # the last block is filled up with padding
        ((12, 37), (150, 150), {0}),  # a layer looks ahead into a block of padding
        ((37, 37), (90, 150), {0}),  # the voice is encoded with the padding of its reference
        ((13, 37), (150, 90), {0, 1}),
    ],
)
def test_where_upstreams_padded_batch_differs_from_its_single_runs_ours_does_not(
    counts: tuple[int, ...], references: tuple[int, ...], differ: set[int], theirs: Any
) -> None:
    codes = [random_codes(count) for count in counts]
    voices = [voice_of(index, frames) for index, frames in enumerate(references)]
    noises = [noise_of(index, 2 * count) for index, count in enumerate(counts)]
    alone = decode_each_alone(theirs, codes, voices, noises)
    together = decode_upstream(theirs, codes, voices, noises)
    ours = decode_ours(Tokenizer25HzDecoder(theirs), codes, voices, noises)
    for index, expected in enumerate(alone):
        error_of_upstream = rel_error(_inner(together[index]), _inner(expected))
        assert error_of_upstream > 1e-3 if index in differ else error_of_upstream <= MAX_REL_ERROR
        assert rel_error(ours[index], expected) <= MAX_REL_ERROR


def _inner(waveform: Tensor) -> Tensor:
    """Without the last 10 mel frames, into which upstream's vocoder lets what follows: the DiT's part of an error."""
    return waveform[: -10 * HOP]


def test_no_codes_give_an_empty_waveform(theirs: Any, voice: Voice) -> None:
    ours = Tokenizer25HzDecoder(theirs)
    some, none = random_codes(5), torch.zeros(0, dtype=torch.long)
    waveforms = ours.decode([none, some], [voice[0]] * 2, [voice[1]] * 2, seeds=[0, 1])
    assert [waveform.shape for waveform in waveforms] == [(0,), (5 * 2 * HOP,)]
    assert ours.decode([], [], []) == []


# -------------------------------------------------------------------------------------------------------------- noise


def test_a_seed_gives_the_same_noise_in_any_batch(theirs: Any, voice: Voice) -> None:
    ours, ids = Tokenizer25HzDecoder(theirs), random_codes(25)
    (alone,) = ours.decode([ids], [voice[0]], [voice[1]], seeds=[5])
    other, same = ours.decode([ids, ids], [voice[0]] * 2, [voice[1]] * 2, seeds=[6, 5])
    assert rel_error(same, alone) <= MAX_REL_ERROR
    assert rel_error(other, alone) > 1e-2


def test_without_seeds_torchs_random_state_decides(theirs: Any, voice: Voice) -> None:
    ours, ids = Tokenizer25HzDecoder(theirs), random_codes(5)
    given = [ids, ids], [voice[0]] * 2, [voice[1]] * 2
    torch.manual_seed(11)
    first = ours.decode(*given)
    second = ours.decode(*given)
    torch.manual_seed(11)
    assert all(map(torch.equal, ours.decode(*given), first))
    assert rel_error(first[1], first[0]) > 1e-2
    assert rel_error(second[0], first[0]) > 1e-2


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_are_referenced_not_copied(theirs: Any, voice: Voice) -> None:
    """A change of upstream's weights shows in ours, for what is computed from them once after `refresh`."""
    changed = copy.deepcopy(theirs)
    ours = Tokenizer25HzDecoder(changed)
    given = [random_codes(13)], [voice], [noise_of(0, 26)]
    (before,) = decode_ours(ours, *given)
    parts = changed.dit.proj_out, changed.dit.transformer_blocks[1].attn.to_k, changed.bigvgan.conv_pre
    for part in (*parts, changed.dit.norm_out.linear):
        with torch.no_grad():
            part.weight *= 1.5
        ours.refresh()
        (after,) = decode_ours(ours, *given)
        assert rel_error(after, before) > 1e-3
        assert rel_error(after, decode_each_alone(changed, *given)[0]) <= MAX_REL_ERROR
        before = after


def test_linear_layers_of_another_dtype(theirs: Any, voice: Voice) -> None:
    changed = copy.deepcopy(theirs)
    ours = Tokenizer25HzDecoder(changed, linear_dtype=torch.bfloat16)
    given = [random_codes(37)], [voice], [noise_of(0, 74)]
    assert changed.dit.transformer_blocks[0].attn.to_q.weight.dtype == torch.bfloat16
    assert changed.dit.proj_out.weight.dtype == torch.float32
    (waveform,) = decode_ours(ours, *given)
    assert waveform.dtype == torch.float32
    assert 1e-5 < rel_error(waveform, decode_each_alone(theirs, *given)[0]) < 5e-2


def test_importing_it_loads_neither_vllm_nor_vllm_omni() -> None:
    code = (
        "import sys, vllm_omni_audio_perf.qwen3_tts; "
        "sys.exit(', '.join(name for name in ('vllm', 'vllm_omni', 'transformers') if name in sys.modules) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# -------------------------------------------------------------------------------------------------------------- errors


def good_input() -> dict[str, list]:
    return {
        "codes": [random_codes(5), random_codes(12)],
        "speakers": [torch.zeros(192), torch.zeros(192)],
        "reference_mels": [torch.zeros(30, 80), torch.zeros(5, 80)],
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("codes", torch.tensor([3, 8194]), r"codes\[1\] has 8194 at position 1 of 2, .*allowed: 0 to 8193"),
        ("codes", torch.tensor([3, 4, -1]), r"codes\[1\] has -1 at position 2 of 3, .*allowed: 0 to 8193"),
        ("codes", torch.zeros(1, 4, dtype=torch.long), r"codes\[1\] has shape \(1, 4\) .*allowed: \(codes,\)"),
        ("codes", torch.zeros(4), r"codes\[1\] .*torch.float32; allowed: .*an integer dtype"),
        ("codes", torch.ones(4, dtype=torch.bool), r"codes\[1\] .*torch.bool; allowed: .*an integer dtype"),
        ("speakers", torch.zeros(1, 192), r"speakers\[1\] has shape \(1, 192\) .*allowed: \(192,\) of a float"),
        ("speakers", torch.zeros(191), r"speakers\[1\] has shape \(191,\) .*allowed: \(192,\) of a float"),
        ("speakers", torch.zeros(192, dtype=torch.int), r"speakers\[1\] .*torch.int32; allowed: \(192,\) of a float"),
        ("reference_mels", torch.zeros(80, 30), r"reference_mels\[1\] has shape \(80, 30\) .*\(frames, 80\)"),
        ("reference_mels", torch.zeros(4, 80), r"reference_mels\[1\] has 4 frames; allowed: at least 5"),
        ("noises", torch.zeros(12, 80), r"noises\[1\] has shape \(12, 80\) .*allowed: \(24, 80\) of a float"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(
    name: str, value: Tensor, message: str, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Tokenizer25HzDecoder(theirs)
    monkeypatch.setattr(ours.synthesizer, "generate", lambda clips: pytest.fail("Something was computed."))
    given = good_input() | ({"noises": [torch.zeros(10, 80), torch.zeros(24, 80)]} if name == "noises" else {})
    given[name][1] = value
    with pytest.raises(ValueError, match=message):
        ours.decode(**given)


@pytest.mark.parametrize("name", ["speakers", "reference_mels", "noises", "seeds"])
def test_lists_of_different_lengths_are_refused(name: str, theirs: Any) -> None:
    given = good_input()
    given[name] = [*given.get(name, []), torch.zeros(192)][:1]
    with pytest.raises(ValueError, match=rf"{name} has 1 entries for 2 sequences of codes; allowed: as many"):
        Tokenizer25HzDecoder(theirs).decode(**given)


def test_noises_and_seeds_together_are_refused(theirs: Any) -> None:
    with pytest.raises(ValueError, match="allowed: one of them, or neither"):
        Tokenizer25HzDecoder(theirs).decode(**good_input(), noises=[], seeds=[1, 2])


def test_good_input_of_other_dtypes_is_taken(theirs: Any) -> None:
    """The shortest reference that the voice encoder takes, too."""
    ours, given = Tokenizer25HzDecoder(theirs), good_input()
    expected = ours.decode(**given, seeds=[1, 2])
    given["codes"] = [ids.int() for ids in given["codes"]]
    given["speakers"] = [speaker.double() for speaker in given["speakers"]]
    assert all(map(torch.equal, ours.decode(**given, seeds=[1, 2]), expected))


def test_a_failure_says_which_sequence(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Tokenizer25HzDecoder(theirs)
    vocoder = ours.synthesizer.vocoder

    def failing(mel: Tensor) -> Tensor:
        if mel.shape[2] == 24:
            raise RuntimeError("no such luck")
        return vocoder(mel)

    monkeypatch.setattr(ours.synthesizer, "vocoder", failing)
    with pytest.raises(RuntimeError, match="no such luck") as caught:
        ours.decode(**good_input())
    assert caught.value.__notes__ == ["While decoding sequence 1 of 2."]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 1}, "num_steps must be at least 2"),
        ({"frames_per_solve": 0}, "frames_per_solve is 0; allowed: at least 1"),
        ({"vocoder_frames": 0}, "vocoder_frames is 0; allowed: at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int], message: str, theirs: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer25HzDecoder(theirs, **settings)


def test_another_module_is_refused(theirs: Any) -> None:
    with pytest.raises(ValueError, match=r"without dit\.proj_out; allowed: a Qwen3TTSTokenizerV1Decoder"):
        Tokenizer25HzDecoder(theirs.dit)
    with pytest.raises(ValueError, match=r"decoder\.dit\.proj_out is torch\.bfloat16; allowed: torch\.float32"):
        Tokenizer25HzDecoder(copy.deepcopy(theirs).bfloat16())
