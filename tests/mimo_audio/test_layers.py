# SPDX-License-Identifier: Apache-2.0
"""Each piece of the decoder against the module of upstream that it replaces, for a batch of padded sequences."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder
from vllm_omni_audio_perf.mimo_audio.layers import rotary_table, rotate
from vllm_omni_audio_perf.ops import WindowedAttention
from vllm_omni_audio_perf.testing.capture_safety import assert_capture_safe

LENGTHS = [1, 17, 40, 0, 64]
TOTAL = 70
TOLERANCE = 2e-6


def sequences(dim: int) -> tuple[Tensor, Tensor]:
    """``[batch, TOTAL, dim]``, garbage beyond each length included, and the lengths."""
    generator = torch.Generator().manual_seed(dim)
    hidden = torch.randn(len(LENGTHS), TOTAL, dim, generator=generator)
    for row, length in zip(hidden, LENGTHS, strict=True):
        row[length:] *= 1e3
    return hidden, torch.tensor(LENGTHS)


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= TOLERANCE * expected.norm()


@pytest.fixture(scope="module")
def decoder(tokenizer: Any) -> FixedShapeDecoder:
    return FixedShapeDecoder(tokenizer)


def test_rotary_table_is_upstreams(tokenizer: Any, decoder: FixedShapeDecoder) -> None:
    from vllm_omni.model_executor.models.mimo_audio.modeling_rope_utils import apply_rotary_pos_emb

    hidden = torch.randn(2, 4, 300, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = tokenizer.decoder.position_embedding(hidden, torch.arange(300))
    ours = decoder.decoder
    table = rotary_table(300, ours.head_dim, base=ours.base, device=torch.device("cpu"))
    check(table[0], cos)
    check(table[1], sin)
    check(rotate(hidden, table), apply_rotary_pos_emb(hidden, cos[None], sin[None]))


@pytest.mark.parametrize("part", ["decoder", "vocoder"])
def test_attention_and_layer(tokenizer: Any, decoder: FixedShapeDecoder, part: str) -> None:
    """Causal in the decoder, within a window in the vocoder."""
    upstream, ours = tokenizer.decoder, decoder.decoder
    if part == "vocoder":
        upstream, ours = upstream.vocoder, ours.vocoder
    hidden, lengths = sequences(upstream.layers[1].embed_dim)
    table = rotary_table(TOTAL, ours.head_dim, base=ours.base, device=hidden.device)
    attend = WindowedAttention(lengths, TOTAL, window=ours.window, causal=part == "decoder")
    with torch.no_grad():
        attended = ours.layers[1].self_attn.forward_fixed(hidden, table, attend)
        layered = ours.layers[1].forward_fixed(hidden, table, attend)
        for index, length in enumerate(LENGTHS):
            if not length:
                continue
            alone = hidden[index, :length]
            of_alone = upstream.position_embedding(alone, torch.arange(length))
            expected = upstream.layers[1].self_attn(alone, torch.tensor([length]), rope_position_embeddings=of_alone)
            check(attended[index, :length], expected)
            expected = upstream.layers[1](alone, torch.tensor([length]), rope_position_embeddings=of_alone)
            check(layered[index, :length], expected)


@pytest.mark.parametrize("name", ["dconv1", "dconv2"])
def test_transposed_convolution(tokenizer: Any, decoder: FixedShapeDecoder, name: str) -> None:
    upstream, ours = getattr(tokenizer.decoder, name), getattr(decoder.decoder, name)
    hidden, lengths = sequences(upstream.in_channels)
    with torch.no_grad():
        actual, counts = ours.forward_fixed(hidden, lengths)
        for index, length in enumerate(LENGTHS):
            if length:
                expected, count = upstream(hidden[index : index + 1, :length], torch.tensor([length]), output_dim=3)
                assert counts[index] == count
                check(actual[index, : counts[index]], expected[0])
    assert counts.tolist() == [2 * length for length in LENGTHS]


def test_head_and_vocoder(tokenizer: Any, decoder: FixedShapeDecoder) -> None:
    upstream, ours = tokenizer.decoder.vocoder, decoder.decoder.vocoder
    hidden, lengths = sequences(48)
    mel, _ = sequences(24)
    with torch.no_grad():
        heads = ours.head.forward_fixed(hidden.clamp(-3, 3), lengths)
        waveforms = ours.forward_fixed(mel, lengths, WindowedAttention)
        for index, length in enumerate(LENGTHS):
            assert not heads[index, 240 * length :].any()
            assert not waveforms[index, 240 * length :].any()
            if length:
                check(heads[index, : 240 * length], upstream.head(hidden[index : index + 1, :length].clamp(-3, 3))[0])
                expected, _ = upstream(mel[index : index + 1, :length].transpose(1, 2), torch.tensor([length]))
                assert (waveforms[index, : 240 * length] - expected.reshape(-1)).norm() <= 1e-5 * expected.norm()


def test_decoder_of_embedded_codes(tokenizer: Any, decoder: FixedShapeDecoder) -> None:
    hidden, lengths = sequences(64)
    with torch.no_grad():
        waveforms = decoder.decoder.forward_fixed(hidden, lengths)
        for index, length in enumerate(LENGTHS):
            assert not waveforms[index, 960 * length :].any()
            if length:
                expected = tokenizer.decoder(hidden[index, :length], torch.tensor([length])).reshape(-1)
                assert (waveforms[index, : 960 * length] - expected).norm() <= 1e-5 * expected.norm()


def test_every_piece_can_be_captured(decoder: FixedShapeDecoder) -> None:
    hidden, lengths = sequences(64)
    mel, _ = sequences(24)
    of_vocoder, _ = sequences(48)
    whole, vocoder = decoder.decoder, decoder.decoder.vocoder

    def layer(module: Any, tensor: Tensor, valid: Tensor) -> Tensor:
        table = rotary_table(TOTAL, 16, base=10_000, device=tensor.device)
        return module.forward_fixed(tensor, table, WindowedAttention(valid, TOTAL, window=(4, 2)))

    class Piece(torch.nn.Module):
        """One piece as a module whose forward is that piece's ``forward_fixed``."""

        def __init__(self, module: Any, run: Any) -> None:
            super().__init__()
            self.module, self.run = module, run

        def forward(self, *inputs: Tensor) -> Any:
            return self.run(self.module, *inputs)

    def fixed(module: Any, *inputs: Tensor) -> Any:
        return module.forward_fixed(*inputs)

    pieces = [
        Piece(whole.layers[0].self_attn, layer),
        Piece(whole.layers[0], layer),
        Piece(whole.dconv1, fixed),
        Piece(whole.dconv2, fixed),
        Piece(whole, fixed),
    ]
    for piece in pieces:
        assert_capture_safe(piece, [hidden, lengths])
    assert_capture_safe(Piece(vocoder.head, fixed), [of_vocoder, lengths])
    run_vocoder = Piece(vocoder, lambda module, *inputs: module.forward_fixed(*inputs, WindowedAttention))
    assert_capture_safe(run_vocoder, [mel, lengths])


def test_how_far_the_vocoder_looks(decoder: FixedShapeDecoder) -> None:
    """By perturbation: each of its layers 40 frames back and 10 ahead, and the inverse STFT two frames either way.

    What the left context must cover, and why the frames that are kept back depend on codes to come.
    """
    frames, place = 600, 300
    mel = torch.randn(1, frames, 24, generator=torch.Generator().manual_seed(0))
    other = mel.clone()
    other[0, place] += 10
    with torch.no_grad():
        before, after = (
            decoder.decoder.vocoder.forward_fixed(hidden, torch.tensor([frames]), WindowedAttention)
            for hidden in (mel, other)
        )
    changed = (before != after)[0].reshape(frames, -1).any(dim=1).nonzero().flatten()
    layers = len(decoder.decoder.vocoder.layers)
    assert int(changed[0]) >= place - 10 * layers - 2
    assert int(changed[-1]) <= place + 40 * layers + 2
    assert len(changed) > 40 + 10
    one_layer = changed[(changed < place - 10) | (changed > place + 40)]
    assert len(one_layer) > 0  # more than one layer sees
