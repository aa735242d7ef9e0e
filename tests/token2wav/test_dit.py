# SPDX-License-Identifier: Apache-2.0
"""One evaluation of the network against upstream's, on the same weights and inputs."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import CODE_COUNTS, evaluate_upstream, other_voice, random_clip, rel_error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni_audio_perf.testing import upstream
from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, cast_linear_layers
from vllm_omni_audio_perf.token2wav import dit as dit_module
from vllm_omni_audio_perf.token2wav.layout import BlockLayout

TIME = torch.tensor(0.3)


def evaluate(dit: BlockDiT, clips: Sequence[Clip], *, guided: bool = True, group_blocks: int = 10_000) -> list[Tensor]:
    """``[copies, frames, mel_dim]`` of each clip."""
    layout = BlockLayout(
        [clip.noise.shape[1] for clip in clips],
        block_size=dit.block_size,
        copies=2 if guided else 1,
        neighbourhoods=dit.neighbourhoods,
        group_blocks=group_blocks,
        device=torch.device("cpu"),
    )
    with torch.inference_mode():
        voices = [dit.voice(clip.speaker, clip.reference_mel) for clip in clips]
        conditions = dit.conditions(layout, voices, [clip.codes for clip in clips], guided=guided)
        mel = layout.pack([clip.noise[0] for clip in clips])
        out = dit.evaluate(mel, dit.modulation_table(TIME.reshape(1)).at(0), conditions, layout.groups)
        copies = [layout.unpack(part) for part in out.chunk(2 if guided else 1)]
    return [torch.stack(parts) for parts in zip(*copies, strict=True)]


def expected(dit: nn.Module, clip: Clip) -> Tensor:
    with torch.inference_mode():
        return evaluate_upstream(dit, clip, TIME)


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_equals_upstream(codes: int, upstream_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    theirs = upstream_token2wav.code2wav_dit_model
    clip = random_clip(codes, voice)
    (actual,) = evaluate(BlockDiT(theirs), [clip])
    assert rel_error(actual, expected(theirs, clip)) <= 1e-6


@pytest.mark.parametrize("group_blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("codes", [12, 13, 37, 61, 120])
def test_any_groups_equal_upstream(
    codes: int, group_blocks: int, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]
) -> None:
    """Whether or not the last group is whole, and where a group ends between the two copies."""
    theirs = vllm_omni_token2wav.code2wav_dit_model
    clip = random_clip(codes, voice)
    (actual,) = evaluate(BlockDiT(theirs), [clip], group_blocks=group_blocks)
    assert rel_error(actual, expected(theirs, clip)) <= 1e-6


@pytest.mark.parametrize("group_blocks", [1, 4, 10_000])
@pytest.mark.parametrize("counts", [(12, 24), (1, 1, 1), (61, 5, 37, 12), (13, 120), (30, 2, 25, 1, 48, 7, 11, 12)])
def test_each_of_several_clips_equals_upstream(
    counts: tuple[int, ...], group_blocks: int, vllm_omni_token2wav: Any
) -> None:
    """Of voices whose references differ in length, too."""
    theirs = vllm_omni_token2wav.code2wav_dit_model
    clips = [random_clip(codes, other_voice(i, 90 + 20 * i), seed=i) for i, codes in enumerate(counts)]
    for clip, actual in zip(clips, evaluate(BlockDiT(theirs), clips, group_blocks=group_blocks), strict=True):
        assert rel_error(actual, expected(theirs, clip)) <= 1e-6


@pytest.mark.parametrize("group_blocks", [3, 10_000])
def test_without_guidance(group_blocks: int, transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    clips = [random_clip(codes, voice) for codes in (37, 5)]
    dit = BlockDiT(transformers_token2wav.code2wav_dit_model)
    for alone, both in zip(
        evaluate(dit, clips, guided=False, group_blocks=group_blocks), evaluate(dit, clips), strict=True
    ):
        assert alone.shape[0] == 1
        assert rel_error(alone[0], both[0]) <= 1e-6


def test_longer_views_than_upstreams(small_config: Any, voice: tuple[Tensor, Tensor]) -> None:
    """Layers that look two blocks back or ahead, in groups shorter than that."""
    theirs: Any = upstream.build_transformers_token2wav(small_config).code2wav_dit_model
    for index, (back, ahead) in enumerate([(2, 0), (0, 2), (3, 2)]):
        theirs.transformer_blocks[index].look_backward_block = back
        theirs.transformer_blocks[index].look_ahead_block = ahead
    clip = random_clip(100, voice)
    for group_blocks in (1, 2, 4, 10_000):
        (actual,) = evaluate(BlockDiT(theirs), [clip], group_blocks=group_blocks)
        assert rel_error(actual, expected(theirs, clip)) <= 1e-6


def test_modulations_are_upstreams(transformers_token2wav: Any) -> None:
    """Shift, scale and gate of each layer and time, from upstream's own modules."""
    theirs = transformers_token2wav.code2wav_dit_model
    times = torch.tensor([0.0, 0.25, 1.0])
    with torch.inference_mode():
        table = BlockDiT(theirs).modulation_table(times)
        hidden = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
        for index, time in enumerate(times):
            embedding = theirs.time_embed(time.reshape(1))
            rows = table.at(index)
            for layer, (shift, scale, gate, ff_shift, ff_scale, ff_gate) in zip(
                theirs.transformer_blocks, rows.layers, strict=True
            ):
                normed, *others = layer.attn_norm(hidden, emb=embedding)
                torch.testing.assert_close(layer.attn_norm.norm(hidden) * scale + shift, normed)
                for actual, wanted in zip((gate, ff_shift, ff_scale - 1, ff_gate), others, strict=True):
                    torch.testing.assert_close(actual, wanted[0])
            scale, shift = rows.final
            torch.testing.assert_close(theirs.norm_out.norm(hidden) * scale + shift, theirs.norm_out(hidden, embedding))


class Allocations(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, views and in-place results aside."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor):
                    self.largest = max(self.largest, tensor.numel())
        return out


def test_intermediates_of_a_layer_do_not_grow_with_the_length(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a group of 4 blocks none is larger than query, key and value of those and a neighbour."""
    dit = BlockDiT(transformers_token2wav.code2wav_dit_model)
    layer, seen = dit._layer, Allocations()

    def watched(*args: Any) -> None:
        with seen:
            layer(*args)

    monkeypatch.setattr(dit, "_layer", watched)
    evaluate(dit, [random_clip(1200, voice)], group_blocks=4)
    assert 0 < seen.largest <= 5 * 24 * 3 * 64


def peak_of_layers(dit: BlockDiT, clip: Clip, group_blocks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the layers of one evaluation hold at most beside what they are given."""
    layer, peaks = dit._layer, []

    def profiled(*args: Any) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            layer(*args)
        live = peak = 0
        events = profile.profiler.kineto_results.events()
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        peaks.append(peak)

    with monkeypatch.context() as patched:
        patched.setattr(dit, "_layer", profiled)
        evaluate(dit, [clip], group_blocks=group_blocks)
    return max(peaks)


@pytest.mark.parametrize("budget", [2**20, 2**22])
def test_groups_stay_within_their_memory(
    budget: int, transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that stands at a time, of the layers that look around them, too; and the budget is made use of."""
    dit = BlockDiT(transformers_token2wav.code2wav_dit_model)
    group_blocks = dit._group_blocks(budget // 2**20, torch.device("meta"))
    peak = peak_of_layers(dit, random_clip(3000, voice), group_blocks, monkeypatch)
    assert 0.6 * budget < peak <= budget


def test_groups_follow_the_budget(transformers_token2wav: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dit = BlockDiT(transformers_token2wav.code2wav_dit_model, group_mib=1)
    device = torch.device("meta")
    # Widths: 64, query, key and value 192, inner 128; at most 448 floats a frame at a time, and a block looked ahead.
    assert dit._group_blocks(1, device) == 2**20 // (448 * 24 * 4) - 1
    assert dit._group_blocks(100, device) == 100 * 2**20 // (448 * 24 * 4) - 1
    monkeypatch.setattr(dit_module, "CPU_INTERMEDIATE_BYTES", 1)
    assert dit._group_blocks(100, torch.device("cpu")) == 1
    assert [group.stop for group in dit.layout([72], guided=False).groups] == [1, 2, 3]


def test_weights_are_referenced_not_copied(transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    """A change of upstream's weights shows in ours."""
    changed = copy.deepcopy(transformers_token2wav).code2wav_dit_model
    dit, clip = BlockDiT(changed), random_clip(5, voice)
    (before,) = evaluate(dit, [clip])
    with torch.no_grad():
        changed.proj_out.bias += 1
    (after,) = evaluate(dit, [clip])
    torch.testing.assert_close(after, before + 1)


@pytest.mark.parametrize("codes", [13, 61])
def test_bfloat16_linear_layers(codes: int, transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    """Closer to float32 than a network that is bfloat16 all over; everything else stays float32."""
    theirs = transformers_token2wav.code2wav_dit_model
    lower = copy.deepcopy(theirs)
    cast_linear_layers(lower, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in lower.named_parameters()}
    for name, dtype in dtypes.items():
        in_layer = name.startswith("transformer_blocks.") and (".attn." in name or ".ff." in name)
        assert dtype == (torch.bfloat16 if in_layer else torch.float32), name
    clip = random_clip(codes, voice)
    (actual,) = evaluate(BlockDiT(lower, linear_dtype=torch.bfloat16), [clip])
    reference = expected(theirs, clip)
    with torch.inference_mode():
        all_over = evaluate_upstream(
            copy.deepcopy(theirs).bfloat16(), Clip(clip.codes, *(t.bfloat16() for t in clip[1:])), TIME.bfloat16()
        )
    assert actual.dtype == torch.float32
    assert 1e-4 < rel_error(actual, reference) < min(3e-2, rel_error(all_over.float(), reference))


def test_bfloat16_before_the_weights_are_loaded(small_config: Any, voice: tuple[Tensor, Tensor]) -> None:
    """As the stage does it: vLLM packs the cast weights for its kernels."""
    pytest.importorskip("vllm_omni")
    theirs: Any = upstream.build_vllm_omni_token2wav(
        small_config, prepare=lambda model: cast_linear_layers(model.code2wav_dit_model, torch.bfloat16)
    )
    clip = random_clip(37, voice)
    (actual,) = evaluate(BlockDiT(theirs.code2wav_dit_model, linear_dtype=torch.bfloat16), [clip])
    reference = expected(upstream.build_vllm_omni_token2wav(small_config).code2wav_dit_model, clip)
    assert 1e-4 < rel_error(actual, reference) < 3e-2
