# SPDX-License-Identifier: Apache-2.0
"""The Token2Wav DiT with block-sparse attention, over the modules of an already built upstream DiT.

Same function as ``Qwen2_5OmniToken2WavDiTModel`` in vLLM-Omni's ``qwen2_5_omni_token2wav.py``, evaluated differently:

- attention visits the blocks that a layer's neighbourhood allows and no others (`block_sparse_attention`), where
  upstream masks a dense ``frames x frames`` product in every layer;
- what does not change during a solve (speaker encoding, code embeddings, rotary table) is computed once a solve
  (`BlockSparseDiT.conditions`), where upstream computes it in each of its 36 evaluations.

The parameters stay where they are: this class holds references to upstream's modules.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.ops import block_sparse_attention
from vllm_omni_audio_perf.qwen2_5_omni.solver import solve_rk4, sway_time_grid

# Without guidance there is no unconditional half of the batch; upstream's threshold.
MIN_GUIDANCE_SCALE = 1e-5

CPU_SPAN_BLOCKS = 40
"""Blocks in a span on the CPU: the largest intermediate, query, key and value of a guided batch, has 24 MB at the size
of the 7B model, and glibc's allocator keeps what is below 32 MiB."""


class Conditions(NamedTuple):
    """What the evaluations of one solve share. With guidance the batch is 2: conditional, then unconditional."""

    constant_inputs: Tensor
    """``[batch, frames, enc_dim + emb_dim + enc_emb_dim]``: what the input projection sees beside the noised mel."""

    cos: Tensor
    """``[frames, head_dim]`` rotary table."""

    sin: Tensor
    """``[frames, head_dim]`` rotary table."""


class BlockSparseDiT:
    """Evaluates and solves a Token2Wav DiT.

    Args:
        model: an upstream ``Qwen2_5OmniToken2WavDiTModel``, vLLM-Omni's or transformers' own. Its attention layers have
            a fused ``qkv_proj`` or separate ``to_q``, ``to_k`` and ``to_v``; both are used in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = cast(Any, model)  # its submodules are upstream's; their types are not ours to declare
        self.block_size: int = self.model.block_size
        self.mel_dim: int = self.model.mel_dim
        self.repeats: int = self.model.repeats
        self.codebook_size: int = self.model.text_embed.codec_embed.num_embeddings

    def conditions(self, speaker: Tensor, reference_mel: Tensor, codes: Tensor, *, guided: bool) -> Conditions:
        """Compute what stays the same during a solve.

        Args:
            speaker: ``[1, enc_emb_dim]`` float32, the speaker embedding.
            reference_mel: ``[1, reference_frames, mel_dim]`` float32, log-mel of the reference voice.
            codes: ``[1, codes]`` int64, each below the size of the codebook.
            guided: whether to append the unconditional entry (no speaker, no reference, code 0) to the batch.
        """
        embed = self.model.input_embed
        code_embedding = self.model.text_embed(codes)  # [1, frames, emb_dim]
        if guided:
            speaker = torch.cat([speaker, torch.zeros_like(speaker)])
            reference_mel = torch.cat([reference_mel, torch.zeros_like(reference_mel)])
            code_embedding = torch.cat([code_embedding, self.model.text_embed(codes, drop_code=True)])
        batch, frames, _ = code_embedding.shape
        voice = embed.spk_encoder(reference_mel)  # [batch, enc_dim]
        constant_inputs = torch.cat(
            [
                voice.unsqueeze(1).expand(batch, frames, -1),
                code_embedding,
                speaker.unsqueeze(1).expand(batch, frames, -1),
            ],
            dim=-1,
        )
        return Conditions(constant_inputs, *self._rotary_table(frames))

    def evaluate(self, mel: Tensor, time: Tensor, conditions: Conditions) -> Tensor:
        """Evaluate the network once.

        Args:
            mel: ``[1, frames, mel_dim]``, the noised mel.
            time: scalar tensor in [0, 1].
            conditions: of this solve; their batch is that of the result.

        Returns:
            ``[batch, frames, mel_dim]``.
        """
        model = self.model
        batch = conditions.constant_inputs.shape[0]
        time_embedding = model.time_embed(time.reshape(1))  # [1, hidden]
        hidden = model.input_embed.proj(
            torch.cat([mel.expand(batch, -1, -1), conditions.constant_inputs], dim=-1)
        )  # [batch, frames, hidden]
        for block in model.transformer_blocks:
            self._transformer_block(block, hidden, time_embedding, conditions)
        return model.proj_out(model.norm_out(hidden, time_embedding))

    def velocity(self, mel: Tensor, time: Tensor, conditions: Conditions, guidance_scale: float) -> Tensor:
        """One evaluation with classifier-free guidance applied, ``[1, frames, mel_dim]``."""
        prediction = self.evaluate(mel, time, conditions)
        if guidance_scale < MIN_GUIDANCE_SCALE:
            return prediction
        conditional, unconditional = prediction.chunk(2)
        return conditional + (conditional - unconditional) * guidance_scale

    def sample(
        self,
        speaker: Tensor,
        reference_mel: Tensor,
        codes: Tensor,
        *,
        noise: Tensor,
        num_steps: int = 10,
        guidance_scale: float = 0.5,
        sway_coefficient: float | None = -1.0,
    ) -> Tensor:
        """Solve from noise to the mel of `codes`.

        Args:
            speaker: ``[1, enc_emb_dim]`` float32.
            reference_mel: ``[1, reference_frames, mel_dim]`` float32.
            codes: ``[1, codes]`` int64.
            noise: ``[1, codes * repeats, mel_dim]`` float32, the state at time 0.
            num_steps: points of the time grid.
            guidance_scale: weight of classifier-free guidance; below 1e-5 there is none, at half the cost.
            sway_coefficient: see `sway_time_grid`.

        Returns:
            ``[1, mel_dim, frames]`` log-mel, 100 frames a second.

        Raises:
            ValueError: if `noise` does not fit `codes`.
        """
        expected = (1, codes.shape[1] * self.repeats, self.mel_dim)
        if tuple(noise.shape) != expected:
            raise ValueError(f"noise for {codes.shape[1]} codes must have shape {expected}, got {tuple(noise.shape)}.")
        conditions = self.conditions(speaker, reference_mel, codes, guided=guidance_scale >= MIN_GUIDANCE_SCALE)
        times = sway_time_grid(num_steps, sway_coefficient, device=noise.device, dtype=speaker.dtype)
        mel = solve_rk4(lambda time, state: self.velocity(state, time, conditions, guidance_scale), noise, times)
        return mel.transpose(1, 2)

    def _transformer_block(self, block: Any, hidden: Tensor, time_embedding: Tensor, conditions: Conditions) -> None:
        """One layer, in place on ``[batch, frames, hidden]``."""
        adaptive_norm = block.attn_norm
        modulation = adaptive_norm.linear(adaptive_norm.silu(time_embedding)).unsqueeze(1)  # [1, 1, 6 * hidden]
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.chunk(6, dim=-1)
        cos, sin = conditions.cos, conditions.sin

        def attend(part: Tensor, frames: slice) -> None:
            normed = torch.addcmul(shift, adaptive_norm.norm(part), 1 + scale)
            part.addcmul_(gate, self._attention(block, normed, cos[frames], sin[frames]))

        own_block_only = block.look_backward_block == block.look_ahead_block == 0
        if not own_block_only:
            attend(hidden, slice(None))
        for frames in self._spans(hidden):
            part = hidden[:, frames]
            if own_block_only:
                attend(part, frames)
            normed = torch.addcmul(ff_shift, block.ff_norm(part), 1 + ff_scale)
            part.addcmul_(ff_gate, block.ff(normed))

    def _spans(self, hidden: Tensor) -> list[slice]:
        """Spans of whole blocks to compute one after the other where no frame needs one of another span.

        On the CPU a span's intermediates stay small enough for the allocator to use again. Larger ones it returns to
        the system, which clears their pages anew for each layer, and the time grows faster than the length.
        """
        frames = hidden.shape[1]
        step = CPU_SPAN_BLOCKS * self.block_size if hidden.device.type == "cpu" else frames
        return [slice(start, start + step) for start in range(0, frames, step)]

    def _attention(self, block: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention = block.attn
        batch, frames, _ = hidden.shape
        query, key, value = (
            part.view(batch, frames, attention.heads, -1) for part in _project_qkv(attention, hidden)
        )  # [batch, frames, heads, head_dim]
        # Trained so: the rotary embedding is applied to the first head only.
        for part in (query, key):
            part[:, :, 0] = _rotate(part[:, :, 0], cos, sin)
        attended = block_sparse_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            block_size=self.block_size,
            look_backward=block.look_backward_block,
            look_ahead=block.look_ahead_block,
        )
        return attention.to_out[0](attended.transpose(1, 2).flatten(2))

    def _rotary_table(self, frames: int) -> tuple[Tensor, Tensor]:
        """cos and sin, ``[frames, head_dim]``, each angle standing for a pair of neighbouring channels."""
        inv_freq = self.model.rotary_embed.inv_freq.float()
        angles = torch.outer(torch.arange(frames, device=inv_freq.device).float(), inv_freq)
        angles = angles.repeat_interleave(2, dim=-1)
        return angles.cos(), angles.sin()


def _project_qkv(attention: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value ``[batch, frames, heads * head_dim]`` of a fused or a separate projection."""
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj(hidden).chunk(3, dim=-1)
    return attention.to_q(hidden), attention.to_k(hidden), attention.to_v(hidden)


def _rotate(channels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channel pairs of ``[batch, frames, head_dim]`` by the angles of ``[frames, head_dim]``."""
    even, odd = channels.unflatten(-1, (-1, 2)).unbind(-1)
    quarter_turn = torch.stack([-odd, even], dim=-1).flatten(-2)
    return channels * cos + quarter_turn * sin
