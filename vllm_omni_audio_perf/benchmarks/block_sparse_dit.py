# SPDX-License-Identifier: Apache-2.0
"""Steps between vLLM-Omni's Token2Wav DiT and ours, which show what each of our techniques brings.

Upstream's network over upstream's modules, operation by operation, with block-sparse attention in place of the dense
masked one and nothing else changed (`BlockSparseDiT.evaluate`); and the same without what a solve can compute before it
(`BlockSparseDiT.evaluate_hoisted`).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vllm_omni_audio_perf.ops import block_sparse_attention


class Rotary(NamedTuple):
    """Upstream's rotary table, an angle for each of a pair of neighbouring channels."""

    cos: Tensor
    """``[2, frames, head_dim]``"""
    sin: Tensor
    """``[2, frames, head_dim]``"""


class Hoisted(NamedTuple):
    """What the evaluations of a solve share, and what one at a time of the grid shares with all solves."""

    constant: Tensor
    """``[2, frames, hidden]``: the input projection of voice and codes, with its bias; conditional, unconditional."""
    rotary: Rotary
    layers: list[Tensor]
    """``[1, 6 * hidden]`` a layer: its adaptive normalisation at this time."""
    final: Tensor
    """``[1, 2 * hidden]``: the last one."""


class BlockSparseDiT:
    """Evaluates a DiT with classifier-free guidance, on one clip.

    Args:
        model: an upstream ``Qwen2_5OmniToken2WavDiTModel``, vLLM-Omni's or transformers' own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = cast(Any, model)  # its submodules are upstream's; their types are not ours to declare

    def evaluate(self, speaker: Tensor, reference_mel: Tensor, codes: Tensor, mel: Tensor, time: Tensor) -> Tensor:
        """Evaluate the network once, from its inputs.

        Args:
            speaker: ``[1, enc_emb_dim]`` float32, the speaker embedding.
            reference_mel: ``[1, reference_frames, mel_dim]`` float32, log-mel of the reference voice.
            codes: ``[1, codes]`` int64.
            mel: ``[1, frames, mel_dim]`` float32, the noised mel.
            time: scalar in [0, 1].

        Returns:
            ``[2, frames, mel_dim]``: conditional, unconditional.
        """
        hidden = self._embed(speaker, reference_mel, codes, mel)
        embedding = self.model.time_embed(time.reshape(1))
        layers = (_modulation(layer.attn_norm, embedding) for layer in self.model.transformer_blocks)
        hidden = self._layers(hidden, layers, Rotary(*self.model.rotary_embed(hidden)))
        return self._project_out(hidden, _modulation(self.model.norm_out, embedding))

    def hoist(self, speaker: Tensor, reference_mel: Tensor, codes: Tensor, time: Tensor) -> Hoisted:
        """Compute what does not depend on the noised mel. Arguments as in :meth:`evaluate`."""
        frames = codes.shape[1] * self.model.repeats
        silence = reference_mel.new_zeros(1, frames, self.model.mel_dim)
        constant = self._embed(speaker, reference_mel, codes, silence)
        embedding = self.model.time_embed(time.reshape(1))
        return Hoisted(
            constant,
            Rotary(*self.model.rotary_embed(constant)),
            [_modulation(layer.attn_norm, embedding) for layer in self.model.transformer_blocks],
            _modulation(self.model.norm_out, embedding),
        )

    def evaluate_hoisted(self, mel: Tensor, hoisted: Hoisted) -> Tensor:
        """As :meth:`evaluate`, of what `hoist` has computed."""
        of_mel = self.model.input_embed.proj.weight[:, : self.model.mel_dim]
        hidden = linear(mel, of_mel) + hoisted.constant
        return self._project_out(self._layers(hidden, hoisted.layers, hoisted.rotary), hoisted.final)

    def _embed(self, speaker: Tensor, reference_mel: Tensor, codes: Tensor, mel: Tensor) -> Tensor:
        """Upstream's input projection ``[2, frames, hidden]``."""
        return self.model.input_embed(
            mel,
            speaker.unsqueeze(1).expand(1, mel.shape[1], -1),
            reference_mel,
            self.model.text_embed(codes),
            code_embed_uncond=self.model.text_embed(codes, drop_code=True),
            apply_cfg=True,
        )

    def _layers(self, hidden: Tensor, modulations: Iterable[Tensor], rotary: Rotary) -> Tensor:
        for layer, modulation in zip(self.model.transformer_blocks, modulations, strict=True):
            shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.unsqueeze(1).chunk(6, dim=-1)
            normed = layer.attn_norm.norm(hidden) * (1 + scale) + shift
            hidden = hidden + gate * self._attend(layer, normed, rotary)
            normed = layer.ff_norm(hidden) * (1 + ff_scale) + ff_shift
            hidden = hidden + ff_gate * layer.ff(normed)
        return hidden

    def _attend(self, layer: Any, hidden: Tensor, rotary: Rotary) -> Tensor:
        attention = layer.attn
        query, key, value = (
            part.unflatten(2, (attention.heads, -1)).transpose(1, 2) for part in _project_qkv(attention, hidden)
        )  # [2, heads, frames, head_dim]
        for part in (query, key):  # trained so: the first head alone
            part[:, 0] = _rotate(part[:, 0], rotary)
        attended = block_sparse_attention(
            query,
            key,
            value,
            block_size=self.model.block_size,
            look_backward=layer.look_backward_block,
            look_ahead=layer.look_ahead_block,
        )
        return attention.to_out[0](attended.transpose(1, 2).flatten(2))

    def _project_out(self, hidden: Tensor, modulation: Tensor) -> Tensor:
        scale, shift = modulation.unsqueeze(1).chunk(2, dim=-1)
        return self.model.proj_out(self.model.norm_out.norm(hidden) * (1 + scale) + shift)


def _modulation(norm: Any, embedding: Tensor) -> Tensor:
    """The modulation of an adaptive normalisation, ``[1, parts * hidden]``."""
    return norm.linear(norm.silu(embedding))


def _project_qkv(attention: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value ``[2, frames, heads * head_dim]`` of a fused or a separate projection."""
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj(hidden).chunk(3, dim=-1)
    return attention.to_q(hidden), attention.to_k(hidden), attention.to_v(hidden)


def _rotate(channels: Tensor, rotary: Rotary) -> Tensor:
    """Rotate neighbouring channel pairs of ``[2, frames, head_dim]``."""
    even, odd = channels.unflatten(-1, (-1, 2)).unbind(-1)
    quarter_turn = torch.stack([-odd, even], dim=-1).flatten(-2)
    return channels * rotary.cos + quarter_turn * rotary.sin
