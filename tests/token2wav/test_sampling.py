# SPDX-License-Identifier: Apache-2.0
"""Whole solves: against upstream's, several clips at once against each alone, from graphs and without."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import CODE_COUNTS, MAX_REL_ERROR, other_voice, random_clip, random_codes, rel_error
from torch import Tensor, nn

from vllm_omni_audio_perf.graphs import CaptureBudget, Fallback, GraphBackend
from vllm_omni_audio_perf.options import MAX_GRAPH_MEL_FRAMES
from vllm_omni_audio_perf.testing.capture_safety import assert_capture_safe
from vllm_omni_audio_perf.testing.graph_backends import ReexecutingBackend, TraceBackend
from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler, cast_linear_layers, graph_blocks

TRANSFORMERS_NOISE_FRAMES = 30_000  # transformers draws noise for this length and cuts it
BUDGET = CaptureBudget(seconds=1000, mib=1000)
MIXED_COUNTS = (37, 1, 12, 61, 24, 5, 13, 48)


def sampler_of(dit: nn.Module, **settings: Any) -> Sampler:
    return Sampler(BlockDiT(dit), **settings)


def drawn(codes: int, voice: tuple[Tensor, Tensor]) -> Clip:
    """With the noise that upstream draws after ``torch.manual_seed(3)``."""
    torch.manual_seed(3)
    return Clip(random_codes(codes), *voice, torch.randn(1, 2 * codes, 80))


def upstreams(dit: Any, clip: Clip, **settings: Any) -> Tensor:
    torch.manual_seed(3)
    with torch.inference_mode():
        return dit.sample(clip.speaker, clip.reference_mel, clip.codes.unsqueeze(0), **settings)


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_equals_vllm_omni(codes: int, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    theirs, clip = vllm_omni_token2wav.code2wav_dit_model, drawn(codes, voice)
    (mel,) = sampler_of(theirs).sample([clip])
    assert mel.shape == (1, 80, 2 * codes)
    assert rel_error(mel, upstreams(theirs, clip)) <= MAX_REL_ERROR


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_equals_transformers(codes: int, transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    theirs = transformers_token2wav.code2wav_dit_model
    torch.manual_seed(3)
    noise = torch.randn(1, TRANSFORMERS_NOISE_FRAMES, 80)[:, : 2 * codes]
    clip = Clip(random_codes(codes), *voice, noise)
    (mel,) = sampler_of(theirs).sample([clip])
    assert rel_error(mel, upstreams(theirs, clip)) <= MAX_REL_ERROR


@pytest.mark.parametrize("guidance_scale", [0.0, 2.0])
@pytest.mark.parametrize("num_steps", [2, 5])
def test_settings_equal_vllm_omnis(
    num_steps: int, guidance_scale: float, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]
) -> None:
    theirs, clip = vllm_omni_token2wav.code2wav_dit_model, drawn(17, voice)
    settings: Any = {"num_steps": num_steps, "guidance_scale": guidance_scale}
    (mel,) = sampler_of(theirs, **settings).sample([clip])
    assert rel_error(mel, upstreams(theirs, clip, **settings)) <= MAX_REL_ERROR


@pytest.mark.parametrize("solver", ["midpoint", "euler"])
def test_other_solvers_approach_the_default(
    solver: str, transformers_token2wav: Any, voice: tuple[Tensor, Tensor]
) -> None:
    """With more and more points they come to the same mel."""
    theirs, clip = transformers_token2wav.code2wav_dit_model, random_clip(13, voice)
    (reference,) = sampler_of(theirs, num_steps=41).sample([clip])
    few, many = (
        rel_error(sampler_of(theirs, solver=solver, num_steps=points).sample([clip])[0], reference)
        for points in (10, 40)
    )
    assert many < few / 1.5  # upstream's embedding of time is rough: no rule converges with its order
    assert few < 0.5


def test_refuses_settings_that_cannot_be_solved(transformers_token2wav: Any) -> None:
    dit = transformers_token2wav.code2wav_dit_model
    with pytest.raises(ValueError, match="num_steps must be at least 2, got 1"):
        sampler_of(dit, num_steps=1)
    with pytest.raises(ValueError, match="no solver 'heun'"):
        sampler_of(dit, solver="heun")


def test_noise_of_another_length_is_refused(transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    clip = random_clip(5, voice)._replace(noise=torch.zeros(1, 9, 80))
    with pytest.raises(ValueError, match=r"\(1, 10, 80\), got \(1, 9, 80\)"):
        sampler_of(transformers_token2wav.code2wav_dit_model).sample([clip])


def test_evaluates_36_times_what_28_times_need(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model)
    evaluated: list[torch.Size] = []
    evaluate = sampler.dit.evaluate
    monkeypatch.setattr(sampler.dit, "evaluate", lambda mel, *rest: evaluated.append(mel.shape) or evaluate(mel, *rest))
    sampler.sample([random_clip(37, voice), random_clip(5, voice)])
    assert evaluated == [(5, 24, 80)] * 36
    assert len(sampler.table.layers) == 28


def test_what_is_constant_is_computed_once(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speaker encoder and the code embeddings once a solve, the normalisations' projections once for all solves."""
    dit = copy.deepcopy(transformers_token2wav.code2wav_dit_model)
    calls: dict[str, int] = {}

    def count(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda *_: calls.__setitem__(name, calls.get(name, 0) + 1))

    count("speaker encoder", dit.input_embed.spk_encoder)
    count("code embedding", dit.text_embed.codec_embed)
    count("time embedding", dit.time_embed)
    count("layer modulation", dit.transformer_blocks[0].attn_norm.linear)
    count("linear layer", dit.transformer_blocks[0].attn.to_out[0])
    sampler = sampler_of(dit)
    for _ in range(2):
        sampler.sample([random_clip(5, voice)])
    assert calls == {
        "speaker encoder": 2,
        "code embedding": 2,
        "time embedding": 1,
        "layer modulation": 1,
        "linear layer": 72,
    }


def mixed_clips() -> list[Clip]:
    """Of several lengths, voices, references and noises."""
    return [random_clip(codes, other_voice(i, 90 + 20 * i), seed=i) for i, codes in enumerate(MIXED_COUNTS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_clips_equal_each_alone(dtype: torch.dtype, transformers_token2wav: Any) -> None:
    dit = transformers_token2wav.code2wav_dit_model
    if dtype == torch.float64:
        dit = copy.deepcopy(dit).double()
    sampler = sampler_of(dit)
    clips = [Clip(clip.codes, *(tensor.to(dtype) for tensor in clip[1:])) for clip in mixed_clips()]
    for clip, together in zip(clips, sampler.sample(clips), strict=True):
        (alone,) = sampler.sample([clip])
        assert together.dtype == dtype
        assert rel_error(together, alone) <= (MAX_REL_ERROR if dtype == torch.float32 else 1e-12)


def test_several_clips_in_bfloat16_layers(transformers_token2wav: Any) -> None:
    dit = copy.deepcopy(transformers_token2wav.code2wav_dit_model)
    cast_linear_layers(dit, torch.bfloat16)
    sampler = Sampler(BlockDiT(dit, linear_dtype=torch.bfloat16))
    reference = sampler_of(transformers_token2wav.code2wav_dit_model)
    clips = mixed_clips()
    for clip, together in zip(clips, sampler.sample(clips), strict=True):
        (alone,) = sampler.sample([clip])
        error = rel_error(alone, reference.sample([clip])[0])
        assert 1e-5 < error < 3e-2
        assert rel_error(together, alone) <= error


@pytest.mark.parametrize("counts", [(2,), (12, 12), (100, 3)])
def test_no_clip_hears_another(counts: Sequence[int], transformers_token2wav: Any) -> None:
    """Whatever stands beside it: garbage of order 1e3 changes nothing."""
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model)
    clip = random_clip(37, other_voice(1, 150))
    loud = [random_clip(codes, other_voice(2, 150)) for codes in counts]
    loud = [other._replace(noise=other.noise * 1e3) for other in loud]
    (alone,) = sampler.sample([clip])
    for position in range(len(loud) + 1):
        together = sampler.sample([*loud[:position], clip, *loud[position:]])
        assert rel_error(together[position], alone) <= 1e-6


def test_memory_groups_change_nothing(transformers_token2wav: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model)
    clips = mixed_clips()
    whole = sampler.sample(clips)
    monkeypatch.setattr(sampler.dit, "_group_blocks", lambda group_mib, device: group_mib)
    for group_blocks in (1, 3, 7):
        for actual, expected in zip(sampler.sample(clips, group_mib=group_blocks), whole, strict=True):
            assert rel_error(actual, expected) <= 1e-6


@pytest.mark.parametrize(
    ("make_backend", "guidance_scale"), [(ReexecutingBackend, 0.5), (ReexecutingBackend, 0.0), (TraceBackend, 0.5)]
)
def test_graphs_change_nothing(make_backend: Any, guidance_scale: float, transformers_token2wav: Any) -> None:
    """At the bucket, padded, of several clips; and beyond the largest bucket, without a graph."""
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model, guidance_scale=guidance_scale)
    clips = mixed_clips()
    batches = [clips[:1], clips[1:3], clips[4:6], clips[:6], clips]
    expected = [sampler.sample(batch) for batch in batches]
    backend: GraphBackend = make_backend()
    runner = sampler.capture([2, 6, 16], backend=backend, budget=BUDGET)
    assert sorted(runner.captured) == [(2,), (6,), (16,)]
    for batch, mels in zip(batches, expected, strict=True):
        for actual, mel in zip(sampler.sample(batch), mels, strict=True):
            assert rel_error(actual, mel) <= MAX_REL_ERROR
    blocks = [sum(-(-clip.codes.shape[0] // 12) for clip in batch) for batch in batches]
    assert blocks == [4, 2, 3, 15, 21]
    assert runner.statistics.hits == 4 * 36
    assert runner.statistics.misses == {Fallback.NO_BUCKET: 36}


def test_graphs_read_the_time_and_the_lengths(transformers_token2wav: Any) -> None:
    """One graph serves all times and all ways to fill its blocks."""
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model)
    clips = [random_clip(codes, other_voice(1, 150), seed=codes) for codes in (5, 31, 13)]
    expected = [sampler.sample([clip])[0] for clip in clips]
    sampler.capture([6], backend=TraceBackend(), budget=BUDGET)
    for mel, clip in zip(expected, clips, strict=True):
        assert rel_error(sampler.sample([clip])[0], mel) <= MAX_REL_ERROR
    for mel, actual in zip(expected, sampler.sample(clips), strict=True):
        assert rel_error(actual, mel) <= MAX_REL_ERROR
    assert sampler.graphs is not None
    assert sampler.graphs.statistics.hits == 4 * 36


@pytest.mark.parametrize("guidance_scale", [0.5, 0.0])
def test_an_evaluation_survives_a_capture(guidance_scale: float, transformers_token2wav: Any) -> None:
    """No read-back, no host tensor, no shape that depends on data. What runs without a graph does not."""
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model, guidance_scale=guidance_scale)
    backend = ReexecutingBackend()
    inputs: list[Sequence[Tensor]] = []
    velocity_fixed = sampler.velocity_fixed
    sampler.velocity_fixed = lambda *given: inputs.append(given) or velocity_fixed(*given)  # type: ignore[method-assign]
    sampler.capture([4], backend=backend, budget=BUDGET)
    del sampler.velocity_fixed
    sampler.graphs = None
    (out,) = assert_capture_safe(sampler, inputs[0], method="velocity_fixed")
    assert out.shape == (4, 24, 80)


def test_new_weights_are_seen_after_a_refresh(transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    """In the table and in the graphs."""
    dit = copy.deepcopy(transformers_token2wav.code2wav_dit_model)
    sampler, clip = sampler_of(dit), random_clip(13, voice)
    sampler.sample([clip])
    sampler.capture([2], backend=ReexecutingBackend(), budget=BUDGET)
    with torch.no_grad():
        dit.time_embed.time_mlp[0].weight.mul_(2)
    sampler.refresh()
    assert sampler.graphs is None
    (expected,) = sampler_of(dit).sample([clip])
    assert torch.equal(sampler.sample([clip])[0], expected)


@pytest.mark.parametrize(
    "change",
    [{"num_steps": 5}, {"num_steps": 14}, {"solver": "euler"}, {"sway_coefficient": None}, {"guidance_scale": 2.0}],
)
def test_a_changed_setting_is_heeded(
    change: dict[str, Any], transformers_token2wav: Any, voice: tuple[Tensor, Tensor]
) -> None:
    """Neither the table nor a graph of the old one is used."""
    dit, clip = transformers_token2wav.code2wav_dit_model, random_clip(13, voice)
    sampler = sampler_of(dit)
    sampler.capture([3], backend=TraceBackend(), budget=BUDGET)
    sampler.sample([clip])
    for name, value in change.items():
        setattr(sampler, name, value)
    (expected,) = sampler_of(dit, **change).sample([clip])
    assert torch.equal(sampler.sample([clip])[0], expected)


def test_clips_of_one_voice_share_its_encoding(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model)
    encoded: list[Tensor] = []
    encode = sampler.dit.voice
    monkeypatch.setattr(sampler.dit, "voice", lambda *given: encoded.append(given[0]) or encode(*given))
    other = other_voice(5, 100)
    sampler.sample([random_clip(5, voice), random_clip(6, other), random_clip(7, voice)])
    assert [speaker is wanted for speaker, wanted in zip(encoded, (voice[0], other[0]), strict=True)] == [True, True]


@pytest.mark.parametrize("dtype", ["bfloat16 layers", "float64"])
def test_graphs_of_other_dtypes(dtype: str, transformers_token2wav: Any) -> None:
    dit = copy.deepcopy(transformers_token2wav.code2wav_dit_model)
    clips = mixed_clips()[:4]
    if dtype == "float64":
        dit.double()
        sampler = sampler_of(dit)
        clips = [Clip(clip.codes, *(tensor.double() for tensor in clip[1:])) for clip in clips]
    else:
        cast_linear_layers(dit, torch.bfloat16)
        sampler = Sampler(BlockDiT(dit, linear_dtype=torch.bfloat16))
    expected = sampler.sample(clips)
    runner = sampler.capture([13], backend=ReexecutingBackend(), budget=BUDGET)
    for actual, wanted in zip(sampler.sample(clips), expected, strict=True):
        assert rel_error(actual, wanted) <= (1e-12 if dtype == "float64" else 5e-3)
    assert runner.statistics.hits == 36


def test_sizes_of_graphs() -> None:
    assert graph_blocks(0) == []
    assert graph_blocks(1) == [1]
    assert graph_blocks(25) == [*range(1, 17), 18, 20, 22, 24, 25]
    for blocks in (40, 400, MAX_GRAPH_MEL_FRAMES // 24):
        sizes = graph_blocks(blocks)
        assert sizes[-1] == blocks
        assert len(sizes) <= 64
        for size, larger in itertools.pairwise(sizes):
            assert larger - size <= max(1, size / 8)


def test_start_up_run_costs_one_evaluation(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(transformers_token2wav.code2wav_dit_model)
    evaluated: list[torch.Size] = []
    evaluate = sampler.dit.evaluate
    monkeypatch.setattr(sampler.dit, "evaluate", lambda mel, *rest: evaluated.append(mel.shape) or evaluate(mel, *rest))
    sampler.evaluate_once(60, *voice)
    assert evaluated == [(3, 24, 80)]
