# SPDX-License-Identifier: Apache-2.0
"""A flow-matching DiT with block-wise attention, over the modules of an already built upstream one.

Same function as ``Qwen2_5OmniToken2WavDiTModel`` in vLLM-Omni's ``qwen2_5_omni_token2wav.py`` and
``Qwen3TTSTokenizerV1DecoderDiTModel`` in its ``modeling_qwen3_tts_tokenizer_v1.py``, evaluated differently:

- several clips are one batch of blocks (`BlockLayout`); attention visits the blocks that a layer's neighbourhood allows
  and no others, where upstream masks a dense ``frames x frames`` product in every layer;
- what depends on time alone is computed once for all solves (`ModulationTable`), what depends on the clip alone once a
  solve (`Conditions`);
- a long batch is evaluated in groups of blocks, so that what a layer computes in between does not grow with the length.

The parameters stay where they are: this class holds references to upstream's modules.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from vllm_omni_audio_perf.ops import packed_block_attention
from vllm_omni_audio_perf.token2wav.layout import BlockLayout, Group

CPU_INTERMEDIATE_BYTES = 24 * 2**20
"""Of the largest intermediate of a group on the CPU. glibc's allocator keeps what is below 32 MiB; larger blocks it
returns to the system, which clears their pages anew for each layer."""

MIB = 2**20


class Voice(NamedTuple):
    """What a voice adds to the input projection, everywhere and for every code."""

    conditional: Tensor
    """``[hidden]``"""
    unconditional: Tensor
    """``[hidden]``: the whole of the constant part without speaker, reference and code."""


class Modulation(NamedTuple):
    """The adaptive normalisations at one time."""

    layers: Tensor
    """``[layers, 6, hidden]``: shift, 1 + scale and gate of the attention, and the same of the feed-forward."""
    final: Tensor
    """``[2, hidden]``: 1 + scale, shift."""


class ModulationTable(NamedTuple):
    """`Modulation` at several times."""

    layers: Tensor
    """``[times, layers, 6, hidden]``"""
    final: Tensor
    """``[times, 2, hidden]``"""

    def at(self, index: int) -> Modulation:
        """That of the time at a position, as views."""
        return Modulation(self.layers[index], self.final[index])


class Conditions(NamedTuple):
    """What the evaluations of one solve share."""

    constant: Tensor
    """``[blocks, block_size, hidden]``: the input projection of voice and codes, with its bias."""
    unconditional: Tensor | None
    """``[blocks, 1, hidden]``: the same of no voice and no codes; None without guidance."""
    rotation: Tensor
    """``[copies * blocks, block_size, 1, head_dim / 2]`` complex: a frame's turn of each pair of channels."""


class BlockDiT:
    """Evaluates a DiT on clips that lie one after another in blocks.

    Args:
        model: an upstream DiT, vLLM-Omni's or transformers' own. Its attention layers have a fused ``qkv_proj`` or
            separate ``to_q``, ``to_k`` and ``to_v``; both are used in place.
        rotary_heads: heads that the rotary embedding is applied to, from the first; None for all. Qwen2.5-Omni was
            trained with 1.
        linear_dtype: of the weights of the layers' linear modules, to which their inputs are cast; see
            `cast_linear_layers`. Everything else is float32.
        group_mib: memory that the intermediates of a group of blocks take at most, in MiB, if one block fits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rotary_heads: int | None = 1,
        linear_dtype: torch.dtype | None = None,
        group_mib: int = 1024,
    ) -> None:
        self.model = cast(Any, model)  # its submodules are upstream's; their types are not ours to declare
        self.block_size: int = self.model.block_size
        self.mel_dim: int = self.model.mel_dim
        self.repeats: int = self.model.repeats
        self.codebook_size: int = self.model.text_embed.codec_embed.num_embeddings
        self.rotary_heads = rotary_heads
        self.linear_dtype = linear_dtype
        self.group_mib = group_mib
        self.layers: list[Any] = list(self.model.transformer_blocks)
        self.neighbourhoods = {(layer.look_backward_block, layer.look_ahead_block) for layer in self.layers}

    # ------------------------------------------------------------------------------------------------ before a solve

    def modulation_table(self, times: Tensor) -> ModulationTable:
        """The adaptive normalisations at each of `times` ``[times]``."""
        embedding = self.model.time_embed(times)  # [times, hidden]
        layers = []
        for layer in self.layers:
            norm = layer.attn_norm
            rows = norm.linear(norm.silu(embedding)).unflatten(1, (6, -1))  # shift, scale, gate, and again
            rows[:, [1, 4]] += 1
            layers.append(rows)
        norm = self.model.norm_out
        final = norm.linear(norm.silu(embedding)).unflatten(1, (2, -1))  # scale, shift
        final[:, 0] += 1
        return ModulationTable(torch.stack(layers, dim=1), final)

    def layout(self, frames: Sequence[int], *, guided: bool, group_mib: int | None = None) -> BlockLayout:
        """Where clips of `frames` mel frames each lie; groups take `group_mib`, or what this DiT takes by default."""
        device = self.model.proj_out.weight.device
        return BlockLayout(
            frames,
            block_size=self.block_size,
            copies=2 if guided else 1,
            neighbourhoods=self.neighbourhoods,
            group_blocks=self._group_blocks(group_mib or self.group_mib, device),
            device=device,
        )

    def voice(self, speaker: Tensor, reference_mel: Tensor) -> Voice:
        """Encode a voice.

        Args:
            speaker: ``[1, enc_emb_dim]`` float32, the speaker embedding.
            reference_mel: ``[1, reference_frames, mel_dim]`` float32, log-mel of the reference voice.
        """
        projection = self.model.input_embed.proj
        _, of_encoder, of_code, of_speaker = self._input_weights()
        encodings = self.model.input_embed.spk_encoder(torch.cat([reference_mel, torch.zeros_like(reference_mel)]))
        encoded, silence = linear(encodings, of_encoder, projection.bias)  # [hidden] each
        no_code = self.model.text_embed.codec_embed.weight[0]
        return Voice(encoded + linear(speaker[0], of_speaker), silence + linear(no_code, of_code))

    def conditions(
        self, layout: BlockLayout, voices: Sequence[Voice], codes: Sequence[Tensor], *, guided: bool
    ) -> Conditions:
        """Compute what stays the same during a solve.

        Args:
            layout: of the clips, of as many copies as `guided` says.
            voices: one a clip.
            codes: ``[codes]`` int64 each, below the size of the codebook; `repeats` mel frames each.
            guided: whether there are unconditional copies.
        """
        embed = self.model.text_embed.codec_embed
        _, _, of_code, _ = self._input_weights()
        constant = layout.pack(
            [
                (linear(embed(ids), of_code) + voice.conditional).repeat_interleave(self.repeats, dim=0)
                for ids, voice in zip(codes, voices, strict=True)
            ]
        )
        unconditional = None
        if guided:
            unconditional = torch.stack([voice.unconditional for voice in voices])[layout.clip].unsqueeze(1)
        rotation = self._rotation(layout.position, constant.dtype)
        return Conditions(constant, unconditional, rotation.repeat(2 if guided else 1, 1, 1, 1))

    # ------------------------------------------------------------------------------------------------- an evaluation

    def velocity(
        self,
        mel: Tensor,
        modulation: Modulation,
        conditions: Conditions,
        groups: Sequence[Group],
        guidance_scale: float,
    ) -> Tensor:
        """One evaluation, with classifier-free guidance applied where the conditions have an unconditional part.

        Args:
            mel: ``[blocks, block_size, mel_dim]``, the noised mel.
            modulation: at this time.
            conditions: of this solve.
            groups: of its layout.
            guidance_scale: weight of the guidance.

        Returns:
            ``[blocks, block_size, mel_dim]``; padded frames hold anything.
        """
        prediction = self.evaluate(mel, modulation, conditions, groups)
        if conditions.unconditional is None:
            return prediction
        conditional, unconditional = prediction.chunk(2)
        return conditional + (conditional - unconditional) * guidance_scale

    def evaluate(self, mel: Tensor, modulation: Modulation, conditions: Conditions, groups: Sequence[Group]) -> Tensor:
        """Evaluate the network once: ``[copies * blocks, block_size, mel_dim]``, conditional blocks first.

        Arguments as in :meth:`velocity`.
        """
        of_mel, *_ = self._input_weights()
        noise = linear(mel, of_mel)
        blocks = noise.shape[0]
        if conditions.unconditional is None:
            hidden = noise.add_(conditions.constant)
        else:
            hidden = noise.new_empty(2 * blocks, *noise.shape[1:])
            torch.add(noise, conditions.constant, out=hidden[:blocks])
            torch.add(noise, conditions.unconditional, out=hidden[blocks:])
        del noise
        for layer, rows in zip(self.layers, modulation.layers.unbind(0), strict=True):
            self._layer(layer, hidden, rows.unbind(0), conditions.rotation, groups)
        scale, shift = modulation.final.unbind(0)
        out = hidden.new_empty(*hidden.shape[:2], self.mel_dim)
        for group in groups:
            part = slice(group.start, group.stop)
            out[part] = self.model.proj_out(self._norm(hidden[part], scale, shift, self.model.norm_out.norm))
        return out

    def _layer(
        self, layer: Any, hidden: Tensor, modulation: Sequence[Tensor], rotation: Tensor, groups: Sequence[Group]
    ) -> None:
        """One transformer layer, in place on ``[blocks, block_size, hidden]``, group by group."""
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation
        back, ahead = layer.look_backward_block, layer.look_ahead_block
        carried: tuple[Tensor, ...] = ()  # keys and values of the blocks before a group, which has changed them by then
        for group in groups:
            start, stop = group.start, group.stop
            seen = min(stop + ahead, hidden.shape[0])  # the blocks after a group are still as the layer found them
            normed = self._norm(hidden[start:seen], scale, shift, layer.attn_norm.norm)
            query, *keys = self._qkv(layer.attn, normed, rotation[start:seen])
            del normed
            if carried:
                keys = [torch.cat(pair) for pair in zip(carried, keys, strict=True)]
            attended = packed_block_attention(
                query[: stop - start],
                *keys,
                look_backward=back,
                look_ahead=ahead,
                first=start - group.keys_start(back),
                restricted=group.restricted.get((back, ahead)),
            )
            if back and stop < hidden.shape[0]:
                last = stop - group.keys_start(back)
                carried = tuple(tensor[max(0, last - back) : last].clone() for tensor in keys)
            del query, keys
            part = hidden[start:stop]
            part.addcmul_(gate, self._linear(layer.attn.to_out[0], attended.flatten(2)))
            del attended
            into, activation, _, out_of = layer.ff.ff
            inner = self._linear(into, self._norm(part, ff_scale, ff_shift, layer.ff_norm))
            inner = gelu(inner, approximate=activation.approximate)
            part.addcmul_(ff_gate, self._linear(out_of, inner))
            del inner  # or it would stand beside the next group's

    def _qkv(self, attention: Any, hidden: Tensor, rotation: Tensor) -> list[Tensor]:
        """Query, key and value ``[blocks, block_size, heads, head_dim]``, rotated. Projections are fused or not."""
        if hasattr(attention, "qkv_proj"):
            projected = self._linear(attention.qkv_proj, hidden).unflatten(2, (3, attention.heads, -1))
            parts = projected.float().unbind(2) if self.linear_dtype else projected.unbind(2)
        else:
            parts = [
                self._linear(module, hidden).unflatten(2, (attention.heads, -1)).to(hidden.dtype)
                for module in (attention.to_q, attention.to_k, attention.to_v)
            ]
        for part in parts[:2]:
            turned = part[:, :, : self.rotary_heads]
            torch.view_as_complex(turned.unflatten(3, (-1, 2))).mul_(rotation)
        return list(parts)

    def _linear(self, module: Any, inputs: Tensor) -> Tensor:
        """A linear module in its own dtype."""
        return module(inputs if self.linear_dtype is None else inputs.to(self.linear_dtype))

    @staticmethod
    def _norm(hidden: Tensor, scale: Tensor, shift: Tensor, norm: Any) -> Tensor:
        """Adaptive layer norm. All blocks are at the same time, so that its modulation is that of an affine one."""
        return layer_norm(hidden, norm.normalized_shape, scale, shift, norm.eps)

    # ------------------------------------------------------------------------------------------------------- details

    def _input_weights(self) -> tuple[Tensor, ...]:
        """The input projection's weights ``[hidden, part]`` for mel, speaker encoding, code embedding and speaker."""
        weight = self.model.input_embed.proj.weight
        embedding = self.model.text_embed.codec_embed.embedding_dim
        encoding = self.model.input_embed.spk_encoder.fc.out_channels
        return weight.split(
            [self.mel_dim, encoding, embedding, weight.shape[1] - self.mel_dim - encoding - embedding], dim=1
        )

    def _rotation(self, position: Tensor, dtype: torch.dtype) -> Tensor:
        """``[blocks, block_size, 1, head_dim / 2]`` for blocks at the given positions in their clips."""
        inv_freq = self.model.rotary_embed.inv_freq.float()
        frame = torch.arange(self.block_size, device=position.device)
        frames = position.unsqueeze(1) * self.block_size + frame  # [blocks, block_size]
        angles = frames.unsqueeze(-1).float() * inv_freq
        return torch.complex(angles.cos().to(dtype), angles.sin().to(dtype)).unsqueeze(2)

    def _group_blocks(self, group_mib: int, device: torch.device) -> int:
        """Blocks in a group."""
        width = self.model.hidden_size
        inner = self.layers[0].ff.ff[0].out_features
        projected = 3 * self.layers[0].attn.inner_dim
        # Projected, keys and values once more behind those carried over, attended and its output; or inner before and
        # after its activation, and its output. The blocks that a group sees after it are projected, too.
        together = max(2 * projected + width, 2 * inner + width)
        blocks = group_mib * MIB // (together * self.block_size * 4) - max(ahead for _, ahead in self.neighbourhoods)
        if device.type == "cpu":
            blocks = min(blocks, CPU_INTERMEDIATE_BYTES // (max(projected, inner) * self.block_size * 4))
        return max(1, blocks)


def cast_linear_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of a DiT's attention and feed-forward layers in place, before or after they are loaded.

    Not after vLLM has packed them for its CPU kernels. The activation between the two feed-forward layers stays in
    this dtype, too.
    """
    for layer in cast(Any, model).transformer_blocks:
        layer.attn.to(dtype)
        layer.ff.to(dtype)
