# SPDX-License-Identifier: Apache-2.0
"""The decoder of the MiMo-Audio tokenizer for padded batches, exact for every length and at any padding.

The same function as ``MiMoAudioTokenizer.decode`` of vLLM-Omni's ``modeling_audio_tokenizer.py`` for each request
alone. What makes padding harmless:

- the embedding of padded codes, whatever they are, is zeroed, and so is what goes into the transposed convolutions;
- group normalisation takes its statistics over the valid steps only;
- attention does not see padded frames;
- the inverse STFT adds up valid frames only, and divides by the windows of those only.

Shapes depend on shapes alone and lengths stay on the device, so that a decode can be captured in a CUDA graph. Pure
torch.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.mimo_audio.layers import (
    ACTIVATIONS,
    NORMS,
    CausalConvTranspose1d,
    TransformerLayer,
    rotary_table,
    transformer_layers,
    valid_steps,
)
from vllm_omni_audio_perf.mimo_audio.varlen import Attention, VarlenAttention, load_flash_attention
from vllm_omni_audio_perf.mimo_audio.vocoder import TransformerVocos
from vllm_omni_audio_perf.ops import WindowedAttention

DEFAULTS: dict[str, Any] = {
    "avg_pooler": 1,
    "d_model": 768,
    "activation_function": "gelu",
    "decoder_layers": 8,
    "decoder_attention_heads": 12,
    "decoder_ffn_dim": 3072,
    "decoder_kernel_size": 3,
    "decoder_stride_size": 2,
    "decoder_causal": True,
    "decoder_attn_window_size": None,
    "nfft": 1024,
    "vocoder_dim": 512,
    "vocoder_intermediate_dim": 4096,
    "vocoder_num_layers": 30,
    "n_mels": 80,
    "sampling_rate": 24_000,
    "hop_length": 240,
    "vocoder_padding": "same",
    "num_quantizers": 12,
    "codebook_size": None,
    "rope_theta": 10_000,
    "rope_type": "default",
    "ln_type": "LayerNorm",
    "vocoder_attention_heads": 4,
    "vocoder_attn_window_size": None,
}
"""Settings that matter for decoding, with the default values of upstream's ``MiMoAudioTokenizerConfig``."""


class AudioDecoder(nn.Module):
    """From embedded codes to a waveform."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.causal: bool = config.decoder_causal
        self.window: tuple[int, int] = tuple(config.decoder_attn_window_size)
        self.base = config.rope_theta
        self.head_dim = config.d_model // config.decoder_attention_heads
        self.dconv1 = (
            CausalConvTranspose1d(config.d_model, config.d_model, config.avg_pooler, config.avg_pooler)
            if config.avg_pooler != 1
            else None
        )
        self.layers = transformer_layers(
            config, config.decoder_layers, config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim
        )
        self.layer_norm = NORMS[config.ln_type](config.d_model)
        self.dconv2 = CausalConvTranspose1d(
            config.d_model, config.n_mels, config.decoder_kernel_size, config.decoder_stride_size
        )
        self.vocoder = TransformerVocos(config)

    def forward_fixed(self, embedded: Tensor, lengths: Tensor, attention: Attention = WindowedAttention) -> Tensor:
        """Decode embedded codes.

        Args:
            embedded: ``[batch, codes, d_model]``; what stands beyond a length is never used.
            lengths: int64 ``[batch]``, valid codes of each.
            attention: prepares the attention of the layers.

        Returns:
            float32 ``[batch, samples]``, zero beyond each length.
        """
        hidden = embedded.to(self.dconv2.conv.weight.dtype)
        if self.dconv1 is not None:
            hidden, lengths = self.dconv1.forward_fixed(hidden, lengths)
        steps = hidden.shape[1]
        table = rotary_table(steps, self.head_dim, base=self.base, device=hidden.device)
        attend = attention(lengths, steps, window=self.window, causal=self.causal, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = cast(TransformerLayer, layer).forward_fixed(hidden, table, attend)
        mel, lengths = self.dconv2.forward_fixed(self.layer_norm(hidden), lengths)
        return self.vocoder.forward_fixed(mel, lengths, attention)


class Codebook(nn.Module):
    """The entries of a codebook, float32 ``[codes, d_model]``, under upstream's name."""

    embed: Tensor

    def __init__(self, codes: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("embed", torch.empty(codes, dim, dtype=torch.float32))


class FixedShapeDecoder(nn.Module):
    """Decodes padded batches of codes.

    Args:
        tokenizer: a loaded upstream ``MiMoAudioTokenizer``. Its parameters are used in place; they are not copied.
        flash_attention: whether `decode_varlen` uses flash-attn.

    Raises:
        ValueError: for a setting of the tokenizer that is not supported; the message names it and what is.
        ImportError: if flash-attn is wanted and not installed.
    """

    def __init__(self, tokenizer: Any, *, flash_attention: bool = False) -> None:
        super().__init__()
        with torch.device("meta"):
            self._build(tokenizer.config)
        # Upstream decodes with codebooks in float32, and makes them so at its first decode.
        tokenizer.encoder.quantizer.float()
        _share_tensors(self, tokenizer)
        self._flash_attention = VarlenAttention(load_flash_attention()) if flash_attention else None
        self.eval()

    @classmethod
    def from_config(
        cls, config: object, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Build a decoder with torch alone. Its weights are uninitialised until `load_state_dict`.

        Args:
            config: upstream's settings, in a mapping or as attributes; what is absent has upstream's default value.
            device: of the parameters.
            dtype: of the parameters but for the codebooks, which are float32.

        Raises:
            ValueError: as for the class.
        """
        decoder = cls.__new__(cls)
        nn.Module.__init__(decoder)
        with torch.device(device or "cpu"):
            decoder._build(config)
        if dtype is not None:
            decoder.decoder.to(dtype)
        decoder._flash_attention = None
        return decoder.eval()

    def _build(self, config: object) -> None:
        settings = decoder_settings(config)
        self.vocoder_window: tuple[int, int] = tuple(settings.vocoder_attn_window_size)
        self.sampling_rate: int = settings.sampling_rate
        self.num_quantizers: int = settings.num_quantizers
        self.codebook_sizes: list[int] = settings.codebook_size
        self.frames_per_code: int = settings.avg_pooler * settings.decoder_stride_size
        self.samples_per_code: int = self.frames_per_code * settings.hop_length
        self.decoder = AudioDecoder(settings)
        self._codebooks = [Codebook(size, settings.d_model) for size in self.codebook_sizes]
        layers = nn.ModuleList(nn.ModuleDict({"_codebook": codebook}) for codebook in self._codebooks)
        self.encoder = nn.ModuleDict({"quantizer": nn.ModuleDict({"vq": nn.ModuleDict({"layers": layers})})})

    @property
    def device(self) -> torch.device:
        """Where the decoder computes."""
        return self.decoder.dconv2.conv.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes; waveforms are float32."""
        return self.decoder.dconv2.conv.weight.dtype

    def decode(self, codes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Decode requests, each as if it were alone.

        Args:
            codes: int64 ``[batch, rows, codes]`` on the decoder's device, rows up to `num_quantizers`, padded with
                anything, ids that no codebook has included.
            lengths: int64 ``[batch]`` on the decoder's device, valid codes of each request, 0 included.

        Returns:
            Waveforms, float32 ``[batch, codes * samples_per_code]``, zero beyond each length, and their samples, int64
            ``[batch]``.

        Raises:
            ValueError: for another shape, dtype or device.
        """
        self._check(codes, lengths)
        return self.decode_fixed(codes, lengths)

    @torch.no_grad()
    def decode_fixed(self, codes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`decode` without its checks: what a graph captures."""
        return self._decode(codes, lengths, WindowedAttention)

    @torch.no_grad()
    def decode_varlen(self, codes: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`decode`, through flash-attn where that was asked for and can be used: on CUDA and in half precision."""
        self._check(codes, lengths)
        attention: Attention = WindowedAttention
        if self._flash_attention is not None and self._can_use_flash_attention():
            attention = self._flash_attention
        return self._decode(codes, lengths, attention)

    def _can_use_flash_attention(self) -> bool:
        return self.device.type == "cuda" and self.dtype in (torch.float16, torch.bfloat16)

    def _decode(self, codes: Tensor, lengths: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        embedded = self._embed(codes, lengths)
        return self.decoder.forward_fixed(embedded, lengths, attention), lengths * self.samples_per_code

    def _embed(self, codes: Tensor, lengths: Tensor) -> Tensor:
        """The sum over rows of the codebooks' entries: float32 ``[batch, codes, d_model]``, zero beyond each length."""
        valid = valid_steps(lengths, codes.shape[2])
        embedded: Tensor | None = None
        for row, codebook in zip(codes.unbind(1), self._codebooks, strict=False):
            entry = nn.functional.embedding(row.clamp(0, codebook.embed.shape[0] - 1), codebook.embed)
            embedded = entry if embedded is None else embedded + entry
        assert embedded is not None
        return embedded.masked_fill(~valid[..., None], 0)

    def _check(self, codes: Tensor, lengths: Tensor) -> None:
        if codes.ndim != 3 or not 1 <= codes.shape[1] <= self.num_quantizers or not codes.shape[2]:
            raise ValueError(
                f"codes have the shape {tuple(codes.shape)}; allowed: (batch, rows, codes) with 1 to "
                f"{self.num_quantizers} rows and at least one code."
            )
        if lengths.shape != codes.shape[:1]:
            raise ValueError(f"lengths have the shape {tuple(lengths.shape)}; allowed: ({codes.shape[0]},).")
        for name, tensor in (("codes", codes), ("lengths", lengths)):
            if tensor.dtype != torch.int64:
                raise ValueError(f"{name} are {tensor.dtype}; allowed: torch.int64.")
            if tensor.device != self.device:
                raise ValueError(f"{name} are on {tensor.device}; allowed: {self.device}, where the decoder is.")


def _share_tensors(ours: nn.Module, theirs: nn.Module) -> None:
    """Put the parameters and buffers of `theirs` in the places of those of the same names, frozen or not."""
    given = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    for prefix, module in ours.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = given[f"{prefix}.{name}"]


def decoder_settings(config: object) -> SimpleNamespace:
    """The settings that matter for decoding, checked.

    Args:
        config: upstream's settings, in a mapping or as attributes.

    Raises:
        ValueError: for one that is not supported; the message names it and what is.
    """
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    settings = SimpleNamespace(**{name: given.get(name, default) for name, default in DEFAULTS.items()})
    for name, allowed in (
        ("rope_type", ["default"]),
        ("vocoder_padding", ["same"]),
        ("ln_type", sorted(NORMS)),
        ("activation_function", sorted(ACTIVATIONS)),
    ):
        if getattr(settings, name) not in allowed:
            raise ValueError(f"{name} is {getattr(settings, name)!r}; allowed: {', '.join(allowed)}.")
    if settings.decoder_kernel_size < settings.decoder_stride_size:
        raise ValueError(
            f"decoder_kernel_size is {settings.decoder_kernel_size}; allowed: at least decoder_stride_size, "
            f"which is {settings.decoder_stride_size}."
        )
    overlap = settings.nfft - settings.hop_length
    if overlap <= 0 or overlap % 2:
        raise ValueError(
            f"nfft is {settings.nfft}; allowed: more than hop_length, which is {settings.hop_length}, by an even "
            "number."
        )
    for dim, heads in (("d_model", "decoder_attention_heads"), ("vocoder_dim", "vocoder_attention_heads")):
        if getattr(settings, dim) % (2 * getattr(settings, heads)):
            raise ValueError(
                f"{dim} is {getattr(settings, dim)}; allowed: a multiple of twice {heads}, which is "
                f"{getattr(settings, heads)}."
            )
    settings.decoder_attn_window_size = settings.decoder_attn_window_size or [-1, -1]
    settings.vocoder_attn_window_size = settings.vocoder_attn_window_size or [40, 10]
    sizes = settings.codebook_size or [1024]
    sizes = [sizes] * settings.num_quantizers if isinstance(sizes, int) else list(sizes)
    sizes += sizes[-1:] * (settings.num_quantizers - len(sizes))
    settings.codebook_size = sizes[: settings.num_quantizers]
    return settings
