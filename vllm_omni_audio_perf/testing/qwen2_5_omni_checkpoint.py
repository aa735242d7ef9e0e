# SPDX-License-Identifier: Apache-2.0
"""Random Qwen2.5-Omni checkpoints with the files, names and vocabularies of Qwen/Qwen2.5-Omni-7B, in small.

They run through transformers and through vLLM-Omni's pipeline like the real one: the thinker answers with some dozen
printable characters, the talker with codes of a few seconds, and Token2Wav turns codes into sound at the level of
speech. Nothing is trained, so all of it is noise. In Token2Wav every parameter is random, biases and activations
included, so that an implementation that drops or misplaces one is found out.

How random language models are made to behave: channel 0 of the residual stream holds one large constant that no layer
changes. After the final norm it is 1, and column 0 of the output head acts as the bias that the head lacks; it puts
every unwanted token out of reach. A reply should neither be empty nor endless, so the token that opens it
(`<|im_start|>`, or the talker's begin-of-codec) carries a mark in a channel of its own, for which one attention head of
the first layer looks back through a window of relative positions. The head reports 1 near the mark and 0 far from it,
and the logit of the token that ends the reply falls with that report.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniDiTConfig,
    Qwen2_5OmniToken2WavConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniToken2WavBigVGANModel,
)

from vllm_omni_audio_perf.testing.byte_tokenizer import PRINTABLE_IDS, save_byte_tokenizer
from vllm_omni_audio_perf.testing.checkpoint_writing import (
    MARKER_FILE,
    normal,
    replaced_folder,
    save_weights,
    write_json,
)

__all__ = ["MARKER_FILE", "STEPS", "Token2WavSize", "make_checkpoint", "make_config"]

Token2WavSize = Literal["tiny", "real"]
_Weights = dict[str, torch.Tensor]

# What `make_checkpoint` reports to its `progress` argument, in this order.
STEPS = ("configuration", "thinker and talker", "token2wav", "safetensors", "tokenizer", "speakers")

# --------------------------------------------------------------------------------------------------------------------
# Tokens. Ids and texts are those of the real tokenizer; vLLM-Omni hard-codes several of them.
# --------------------------------------------------------------------------------------------------------------------

_SPECIAL_TOKENS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|AUDIO|>": 151646,
    "<|audio_bos|>": 151647,
    "<|audio_eos|>": 151648,
    "<|box_end|>": 151649,
    "<|quad_start|>": 151650,
    "<|quad_end|>": 151651,
    "<|vision_bos|>": 151652,
    "<|vision_eos|>": 151653,
    "<|vision_pad|>": 151654,
    "<|IMAGE|>": 151655,
    "<|VIDEO|>": 151656,
}
_PLAIN_TOKENS = {
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<|fim_prefix|>": 151659,
    "<|fim_middle|>": 151660,
    "<|fim_suffix|>": 151661,
    "<|fim_pad|>": 151662,
    "<|repo_name|>": 151663,
    "<|file_sep|>": 151664,
}
_NAMED_TOKENS = {  # what Qwen2_5OmniProcessor asks its tokenizer for
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_TEXT_PAD = _SPECIAL_TOKENS["<|endoftext|>"]
_TEXT_START = _SPECIAL_TOKENS["<|im_start|>"]
_TEXT_END = _SPECIAL_TOKENS["<|im_end|>"]
_TEXT_VOCABULARY = 152064

_CODEC_VOCABULARY = 8448
_NUM_CODES = 8192  # ids below are codes; those between and the control ids are unused
_CODEC_START = 8293
_CODEC_END = 8294

_SPEAKERS = {"Chelsie": 151872, "Ethan": 151870}  # name to the text token that begins its speech

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part['type'] == 'audio' or 'audio' in part or 'audio_url' in part or 'input_audio' in part %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part['type'] == 'video' or 'video' in part or 'video_url' in part %}"
    "<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in part %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Feature extractor and image processor in one file, as in the real repository.
_PREPROCESSOR = {
    "chunk_length": 300,
    "dither": 0.0,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_fft": 400,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "padding_side": "left",
    "padding_value": 0.0,
    "patch_size": 14,
    "processor_class": "Qwen2_5OmniProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16000,
    "temporal_patch_size": 2,
}

# --------------------------------------------------------------------------------------------------------------------
# Configuration
# --------------------------------------------------------------------------------------------------------------------

_THINKER_WIDTH = 128
_TALKER_WIDTH = 64
_NUM_LAYERS = 2
_HEAD_DIM = 32  # a size that vLLM's CPU attention accepts
_MROPE_SECTION = [4, 6, 6]  # rotary pairs for time, height, width; half of _HEAD_DIM together
_MAX_POSITIONS = 4096

_TINY_DIT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "emb_dim": 32,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 2],
    "enc_dim": 32,
    "enc_channels": [32, 32, 32, 32, 96],
    "enc_attention_channels": 16,
    "enc_se_channels": 16,
}
_TINY_BIGVGAN: dict[str, Any] = {"upsample_initial_channel": 128}


def make_config(token2wav: Token2WavSize = "tiny") -> Qwen2_5OmniConfig:
    """Return the configuration of a random checkpoint.

    Args:
        token2wav: "tiny" for a DiT and a BigVGAN of a few MB together, "real" for those of Qwen2.5-Omni-7B. Block
            size, code repeats, mel channels and hop length are the real ones in both.

    Returns:
        A configuration with a tiny thinker (width 128, 2 layers) and talker (width 64, 2 layers) and full-size
        vocabularies.

    Raises:
        ValueError: `token2wav` is neither.
    """
    _check_token2wav(token2wav)
    rope = {"type": "default", "rope_type": "default", "rope_theta": 1000000.0, "mrope_section": _MROPE_SECTION}
    # transformers' defaults for the DiT and BigVGAN are the sizes of Qwen2.5-Omni-7B.
    dit, bigvgan = (_TINY_DIT, _TINY_BIGVGAN) if token2wav == "tiny" else ({}, {})
    config = Qwen2_5OmniConfig(
        thinker_config={
            "text_config": {
                "vocab_size": _TEXT_VOCABULARY,
                "hidden_size": _THINKER_WIDTH,
                "intermediate_size": 256,
                "num_hidden_layers": _NUM_LAYERS,
                "num_attention_heads": _THINKER_WIDTH // _HEAD_DIM,
                "num_key_value_heads": 2,
                "max_position_embeddings": _MAX_POSITIONS,
                "rope_parameters": dict(rope),
                "tie_word_embeddings": False,
                "dtype": "bfloat16",
            },
            "audio_config": {
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "d_model": 64,
                "output_dim": _THINKER_WIDTH,
                "dtype": "bfloat16",
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": _THINKER_WIDTH,
                "fullatt_block_indexes": [1],
                "tokens_per_second": 25,
                "dtype": "bfloat16",
            },
            "vision_start_token_id": _SPECIAL_TOKENS["<|vision_bos|>"],
            "vision_end_token_id": _SPECIAL_TOKENS["<|vision_eos|>"],
            "vision_token_id": _SPECIAL_TOKENS["<|vision_pad|>"],
            "pad_token_id": _TEXT_PAD,
            "bos_token_id": _TEXT_START,
            "eos_token_id": _TEXT_END,
            "dtype": "bfloat16",
        },
        talker_config={
            "vocab_size": _CODEC_VOCABULARY,
            "embedding_size": _THINKER_WIDTH,
            "hidden_size": _TALKER_WIDTH,
            "intermediate_size": 128,
            "num_hidden_layers": _NUM_LAYERS,
            "num_attention_heads": _TALKER_WIDTH // _HEAD_DIM,
            "num_key_value_heads": _TALKER_WIDTH // _HEAD_DIM,
            "head_dim": _HEAD_DIM,
            "max_position_embeddings": _MAX_POSITIONS,
            "rope_parameters": dict(rope),
            "dtype": "bfloat16",
        },
        # A pipeline that runs in bfloat16 passes its type on to whatever does not name one, and the mel then meets
        # float32 weights.
        token2wav_config={
            "dit_config": {**dit, "dtype": "float32"},
            "bigvgan_config": {**bigvgan, "dtype": "float32"},
            "dtype": "float32",
        },
        enable_audio_output=True,
        dtype="bfloat16",
    )
    config.architectures = ["Qwen2_5OmniModel"]
    return config


def _check_token2wav(token2wav: str) -> None:
    if token2wav not in get_args(Token2WavSize):
        raise ValueError(f"token2wav must be one of {', '.join(get_args(Token2WavSize))}; got {token2wav!r}")


# --------------------------------------------------------------------------------------------------------------------
# Weights: a random start for every tensor
# --------------------------------------------------------------------------------------------------------------------

_LANGUAGE = ("thinker.", "talker.")
_DIT = "token2wav.code2wav_dit_model."
_BIGVGAN = "token2wav.code2wav_bigvgan_model."

# Gains of matrices and convolutions, by a part of the name; 1, which preserves the variance, elsewhere.
_GAINS = {
    # Peaky enough for attention to tell tokens and frames apart.
    ".self_attn.q_proj.": 1.5,
    ".self_attn.k_proj.": 1.5,
    ".attn.to_q.": 1.25,
    ".attn.to_k.": 1.25,
    # The next token is to depend on the tokens before the last one, too: else replies run into loops.
    ".self_attn.o_proj.": 2.0,
    ".mlp.down_proj.": 0.5,
    ".time_mlp.2.": 1.7,  # makes up for the SiLU before it
    ".convs2.": 0.5,  # BigVGAN's residual branches, three in a row
    ".conv_pre.": 2.0,  # its input, a normalised mel, has an RMS of about 0.4
}
_BIAS_STD = 0.1
_NORM_STD = 0.1
_SNAKE_STD = 0.2  # alpha and beta are logarithms


def _random_tensor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the random start of a parameter, float32."""
    noise = normal(name, shape, seed)
    if name.endswith((".alpha", ".beta")):
        return noise.mul_(_SNAKE_STD)
    if name.endswith(".bias"):
        return noise.mul_(_BIAS_STD)
    if len(shape) == 1:  # the weight of a norm
        return noise.mul_(_NORM_STD).add_(1)
    if name.endswith(("embed_tokens.weight", "codec_embed.weight", "audio_bos_eos_token.weight")):
        return noise
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    return noise.mul_(gain / math.sqrt(math.prod(shape[1:])))


# --------------------------------------------------------------------------------------------------------------------
# Weights: thinker and talker
# --------------------------------------------------------------------------------------------------------------------

# Channels of the residual stream that are not random.
_BIAS = 0  # the constant
_MARK = 1  # 1 at the token that opens a reply, else 0
_NEARNESS = 2  # written by the first layer: 1 near the mark, 0 far from it
_CODEC_MARK = 3  # the talker's mark while it is as wide as the thinker, where codes and thinker states are added up
_RESERVED = [_BIAS, _MARK, _NEARNESS, _CODEC_MARK]

# The constant in terms of the RMS that a norm divides by. Large against the random channels: the RMS hardly varies, and
# the bias logits stay put.
_CONSTANT_RMS = 8.0
# RMS of the random channels before each norm, in the order in which they come; the norms bring it to 1. Measured.
# Beside a constant that large the norms would not correct a wrong value, and it would grow from layer to layer.
_CONTENT_RMS = (1.0, 1.4, 1.4, 2.0, 2.0)

_UNREACHABLE_LOGIT = -30.0

# Window of the heads that look at the last few tokens, in the terms of `_Reply.window`.
_LOCAL_WINDOW = {2: 2.0, 3: 2.0, 4: 2.0}


@dataclass(frozen=True)
class _Reply:
    """What a language model's replies consist of and how long they are.

    Attributes:
        tokens: the ids that a reply consists of.
        end: the id that ends it.
        window: index of a rotary frequency to strength. The attention score of a token d positions back is the sum of
            strength * cos(frequency * d).
        mark_score: attention score of the mark on top of that. The head reports less than 1/2 from the distance on at
            which the window's decline has used it up.
        token_logit: mean logit of the tokens. Positive, so that a repetition penalty lowers it by a constant.
        token_logit_std: spread of a token's logit over contexts.
        end_logit: mean logit of the end, far from the mark.
        end_logit_drop: by how much it is lower near the mark.
        end_logit_std: its spread over contexts.
    """

    tokens: Sequence[int]
    end: int
    window: Mapping[int, float]
    mark_score: float
    token_logit: float
    token_logit_std: float
    end_logit: float
    end_logit_drop: float
    end_logit_std: float


# Windows, scores and logits are tuned for 30 to 80 characters and 100 to 300 codes under the sampling parameters of
# vLLM-Omni's qwen2_5_omni.yaml.
_TEXT_REPLY = _Reply(
    tokens=PRINTABLE_IDS,
    end=_TEXT_END,
    window={4: 4.0, 5: 3.0, 6: 3.0, 7: 3.0},
    mark_score=4.5,
    token_logit=5.0,
    token_logit_std=2.0,
    end_logit=8.0,
    end_logit_drop=12.0,
    end_logit_std=1.0,
)
_CODEC_REPLY = _Reply(
    tokens=range(_NUM_CODES),
    end=_CODEC_END,
    window={5: 2.5, 6: 6.0, 7: 3.0},
    mark_score=6.5,
    token_logit=5.0,
    token_logit_std=1.5,
    end_logit=10.5,
    end_logit_drop=12.0,
    end_logit_std=1.0,
)


def _language_weights(shapes: Mapping[str, Sequence[int]], seed: int) -> _Weights:
    """Return the parameters of thinker and talker, bfloat16."""
    weights = {name: _random_tensor(name, shape, seed) for name, shape in shapes.items() if name.startswith(_LANGUAGE)}

    constant = _constant(_THINKER_WIDTH)
    for name in ("thinker.model.embed_tokens.weight", "thinker.audio_tower.audio_bos_eos_token.weight"):
        weights[name][:, _RESERVED] = 0
        weights[name][:, _BIAS] = constant
    weights["thinker.model.embed_tokens.weight"][_TEXT_START, _MARK] = 1
    for encoder_output in ("thinker.audio_tower.proj", "thinker.visual.merger.mlp.2"):  # in the place of embeddings
        _write_constant(weights, encoder_output, constant)
    _wire_decoder(weights, "thinker.model.", _TEXT_REPLY, constant)
    _wire_head(weights["thinker.lm_head.weight"], _TEXT_REPLY)

    constant = _constant(_TALKER_WIDTH)
    weights["talker.model.embed_tokens.weight"][:, _RESERVED] = 0
    weights["talker.model.embed_tokens.weight"][_CODEC_START, _CODEC_MARK] = 1
    projection = "talker.thinker_to_talker_proj"
    weights[f"{projection}.weight"][:, _RESERVED] = 0
    _write_constant(weights, projection, constant)
    weights[f"{projection}.weight"][_MARK, _CODEC_MARK] = 1
    _wire_decoder(weights, "talker.model.", _CODEC_REPLY, constant)
    _wire_head(weights["talker.codec_head.weight"], _CODEC_REPLY)
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def _constant(width: int) -> int:
    return round(_CONSTANT_RMS * math.sqrt(width))  # an integer up to 256 is exact in bfloat16


def _write_constant(weights: _Weights, linear: str, constant: int) -> None:
    """Make a linear layer write the constant into its channel and nothing into the other reserved ones, in place."""
    weights[f"{linear}.weight"][_RESERVED] = 0
    weights[f"{linear}.bias"][_RESERVED] = 0
    weights[f"{linear}.bias"][_BIAS] = constant


def _wire_decoder(weights: _Weights, prefix: str, reply: _Reply, constant: int) -> None:
    """Make a random decoder fit for replies, in place.

    Args:
        weights: of the whole model.
        prefix: of the decoder's parameters, such as "thinker.model.".
        reply: says how far the head for the mark sees.
        constant: what channel 0 holds.
    """
    layers = [f"{prefix}layers.{index}." for index in range(_NUM_LAYERS)]
    for layer in layers:
        for projection in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"{layer}{projection}.weight"][_RESERVED] = 0
        for projection in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = weights[f"{layer}{projection}.bias"].view(-1, _HEAD_DIM)
            _set_window(heads[len(heads) // 2 :], _LOCAL_WINDOW)  # the other half sees the whole context

    norms = [f"{layer}{name}_layernorm" for layer in layers for name in ("input", "post_attention")]
    for norm, content_rms in zip([*norms, f"{prefix}norm"], _CONTENT_RMS, strict=True):
        weight = weights[f"{norm}.weight"]
        weight.mul_(math.hypot(_CONSTANT_RMS, content_rms) / content_rms)
        weight[_RESERVED] = 0
    weights[f"{norms[0]}.weight"][_MARK] = _CONSTANT_RMS
    rms = math.hypot(_CONSTANT_RMS, _CONTENT_RMS[-1])
    weights[f"{prefix}norm.weight"][_BIAS] = rms / constant
    weights[f"{prefix}norm.weight"][_NEARNESS] = rms

    _wire_mark_head(weights, f"{layers[0]}self_attn.", reply)


def _wire_mark_head(weights: _Weights, attention: str, reply: _Reply) -> None:
    """Make the first head of an attention layer write how near the mark is, in place."""
    query_bias, key_bias = (weights[f"{attention}{name}.bias"][:_HEAD_DIM] for name in ("q_proj", "k_proj"))
    key_weight, value_weight = (weights[f"{attention}{name}.weight"][:_HEAD_DIM] for name in ("k_proj", "v_proj"))
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"{attention}{name}.weight"][:_HEAD_DIM] = 0
        weights[f"{attention}{name}.bias"][:_HEAD_DIM] = 0
    _set_window(query_bias, reply.window)
    _set_window(key_bias, reply.window)
    # The slowest rotation hardly turns: through it the mark gets its score at any distance.
    slowest = _HEAD_DIM // 2 - 1
    query_bias[slowest] = key_weight[slowest, _MARK] = _amplitude(reply.mark_score)
    value_weight[0, _MARK] = 1
    output_weight = weights[f"{attention}o_proj.weight"]
    output_weight[:, 0] = 0
    output_weight[_NEARNESS, 0] = 1


def _set_window(bias: torch.Tensor, window: Mapping[int, float]) -> None:
    """Set the components of a query or key bias (..., head size) that make attention a function of distance, in place.

    A query and a key that are the same at all positions differ by their rotations alone.
    """
    for frequency, strength in window.items():
        bias[..., frequency] = _amplitude(strength)


def _amplitude(score: float) -> float:
    """Return the size of a query component and a key component that together give this attention score."""
    return math.sqrt(score * math.sqrt(_HEAD_DIM))


def _wire_head(head: torch.Tensor, reply: _Reply) -> None:
    """Give an output head (vocabulary, width) its biases, in place.

    The column of the nearness stays random for all other tokens: their mean logits drift while a reply goes on.
    """
    head.mul_(reply.token_logit_std)
    head[reply.end] *= reply.end_logit_std / reply.token_logit_std
    head[:, [_MARK, _CODEC_MARK]] = 0
    head[:, _BIAS] = _UNREACHABLE_LOGIT
    head[list(reply.tokens), _BIAS] = reply.token_logit
    head[reply.end, _BIAS] = reply.end_logit
    head[reply.end, _NEARNESS] = -reply.end_logit_drop


# --------------------------------------------------------------------------------------------------------------------
# Weights: Token2Wav
# --------------------------------------------------------------------------------------------------------------------

# Standard deviation of the constant part of the DiT's shifts, scales and gates, and of the part that varies with time.
_MODULATION_STD = 0.35
_SILU_RMS = 0.6  # of the SiLU of a standard normal variable

# Shares of the DiT's inputs in the variance of its first hidden state, whatever their widths. The sound is to depend
# most on the codes.
_INPUT_SHARES = {"mel": 0.3, "speaker encoding": 0.1, "code": 0.5, "speaker embedding": 0.1}

# Natural logarithms of mel magnitudes. BigVGAN maps -10.9 to -1 and 2.3 to 1, and clips what lies outside.
_MEL_MEAN_LOW, _MEL_MEAN_HIGH = -3.5, -6.5  # at the lowest and the highest channel
_VELOCITY_STD = 1.2  # of what the DiT adds to the noise that it starts from
_MEL_STD = 1.8  # of the sum, after guidance; measured

_LEVEL_DB = -20.0  # RMS of the sound in dB of full scale
_LEVEL_STEP_DB = 0.75  # the gain is rounded to it: the last bits of a measurement depend on the number of threads
_PROBE_FRAMES = 32


def _token2wav_weights(shapes: Mapping[str, Sequence[int]], config: Qwen2_5OmniToken2WavConfig, seed: int) -> _Weights:
    """Return the parameters of DiT and BigVGAN, float32."""
    prefixes = (_DIT, _BIGVGAN)
    weights = {name: _random_tensor(name, shape, seed) for name, shape in shapes.items() if name.startswith(prefixes)}
    _scale_dit(weights, config.dit_config)
    _scale_bigvgan(weights, config.bigvgan_config, seed)
    return weights


def _scale_dit(weights: _Weights, config: Qwen2_5OmniDiTConfig) -> None:
    """Turn a random start of the DiT into one with mels in the range of speech, in place; add its one buffer."""
    for name, weight in weights.items():
        if name.startswith(_DIT) and name.endswith(("attn_norm.linear.weight", "norm_out.linear.weight")):
            weight.mul_(_MODULATION_STD / _SILU_RMS)
        elif name.startswith(_DIT) and name.endswith(("attn_norm.linear.bias", "norm_out.linear.bias")):
            weight.mul_(_MODULATION_STD / _BIAS_STD)

    widths = {  # in the order in which the DiT concatenates them
        "mel": config.mel_dim,
        "speaker encoding": config.enc_dim,
        "code": config.emb_dim,
        "speaker embedding": config.enc_emb_dim,
    }
    projection = weights[f"{_DIT}input_embed.proj.weight"]
    for part, (name, width) in zip(projection.split(list(widths.values()), dim=1), widths.items(), strict=True):
        part.mul_(math.sqrt(_INPUT_SHARES[name] * projection.shape[1] / width))

    weights[f"{_DIT}proj_out.weight"].mul_(_VELOCITY_STD)
    weights[f"{_DIT}proj_out.bias"].add_(_mean_mel(config.mel_dim))

    # vLLM-Omni registers this buffer as part of the state and takes it from the files.
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    weights[f"{_DIT}rotary_embed.inv_freq"] = 1.0 / 10000.0**exponents


def _scale_bigvgan(weights: _Weights, config: Qwen2_5OmniBigVGANConfig, seed: int) -> None:
    """Turn a random start of BigVGAN into one whose sound has the level of speech, in place."""
    for layer, rate in enumerate(config.upsample_rates):
        # The start divides by the root of output channels * kernel. A transposed convolution adds up input channels *
        # kernel / rate products, and these have twice as many input channels as output channels.
        weights[f"{_BIGVGAN}ups.{layer}.0.weight"].mul_(math.sqrt(rate / 2))
    # Taps that add up to zero keep the offset that the Snake activations leave out of the sound.
    last = weights[f"{_BIGVGAN}conv_post.weight"]
    last.sub_(last.mean(dim=-1, keepdim=True))
    gain_db = _LEVEL_STEP_DB * round((_LEVEL_DB - _level_db(weights, config, seed)) / _LEVEL_STEP_DB)
    last.mul_(10 ** (gain_db / 20))


@torch.no_grad()
def _level_db(weights: _Weights, config: Qwen2_5OmniBigVGANConfig, seed: int) -> float:
    """Return the RMS of BigVGAN's sound in dB of full scale, for a random mel."""
    with torch.random.fork_rng(devices=[]):  # the constructor draws numbers
        vocoder = Qwen2_5OmniToken2WavBigVGANModel(config).eval()
    state = {name.removeprefix(_BIGVGAN): weight for name, weight in weights.items() if name.startswith(_BIGVGAN)}
    headroom_db = 60.0  # the model clips at full scale
    state["conv_post.weight"] = state["conv_post.weight"] * 10 ** (-headroom_db / 20)
    vocoder.load_state_dict(state, assign=True)
    mel = _mean_mel(config.mel_dim)[:, None] + _MEL_STD * normal("probe", (1, config.mel_dim, _PROBE_FRAMES), seed)
    return 10 * math.log10(vocoder(mel).square().mean().item()) + headroom_db


def _mean_mel(mel_dim: int) -> torch.Tensor:
    return torch.linspace(_MEL_MEAN_LOW, _MEL_MEAN_HIGH, mel_dim)


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------

_LARGEST_SHARD = 0.25  # of the whole: four or five files, as in the real repository, if no tensor is larger
_REFERENCE_FRAMES = 150  # of a speaker's mel; 1.5 s


def make_checkpoint(
    path: str | os.PathLike[str],
    *,
    token2wav: Token2WavSize = "tiny",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a random Qwen2.5-Omni checkpoint.

    The same arguments give the same bytes with the same versions of torch, transformers and safetensors. The caller's
    random state is left alone.

    Args:
        path: the folder to write. It may exist if it is empty, or if it is an earlier checkpoint of this function,
            which is replaced. An interrupted run leaves no checkpoint there.
        token2wav: "tiny", about 95 MB in all, or "real" for the DiT and BigVGAN of Qwen2.5-Omni-7B, about 1.9 GB.
        seed: any integer.
        progress: called with each element of `STEPS` when that step begins.

    Returns:
        The folder.

    Raises:
        FileExistsError: `path` is a file, or a folder with other contents.
        ValueError: `token2wav` is neither "tiny" nor "real".
    """
    _check_token2wav(token2wav)
    target = Path(path)
    with replaced_folder(target) as directory, _quiet_transformers():
        _write(directory, token2wav, seed, progress or (lambda step: None))
    return target


def _write(directory: Path, token2wav: Token2WavSize, seed: int, report: Callable[[str], None]) -> None:
    report("configuration")
    config = make_config(token2wav)
    write_json(directory / "config.json", config.to_dict())
    generation = {"eos_token_id": [_TEXT_END, _TEXT_PAD], "pad_token_id": _TEXT_PAD, "do_sample": False}
    write_json(directory / "generation_config.json", generation)
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    report("thinker and talker")
    weights = _language_weights(shapes, seed)
    report("token2wav")
    weights |= _token2wav_weights(shapes, config.token2wav_config, seed)
    report("safetensors")
    save_weights(directory, weights, largest_shard=_LARGEST_SHARD)

    report("tokenizer")
    save_byte_tokenizer(
        directory,
        special_tokens=_SPECIAL_TOKENS,
        plain_tokens=_PLAIN_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        named_tokens=_NAMED_TOKENS,
        chat_template=_CHAT_TEMPLATE,
    )
    write_json(directory / "chat_template.json", {"chat_template": _CHAT_TEMPLATE})
    write_json(directory / "preprocessor_config.json", _PREPROCESSOR)

    report("speakers")
    _save_speakers(directory / "spk_dict.pt", config.token2wav_config.dit_config, seed)
    write_json(directory / MARKER_FILE, {"model": "qwen2_5_omni", "token2wav": token2wav, "seed": seed})


def _save_speakers(path: Path, config: Qwen2_5OmniDiTConfig, seed: int) -> None:
    """Write the voices: "cond" (1, 192), the speaker embedding; "ref_mel" (1, frames, 80); and the id "bos_token"."""
    speakers = {
        name: {
            "cond": normal(f"{name}.cond", (1, config.enc_emb_dim), seed),
            "ref_mel": _mean_mel(config.mel_dim)
            + normal(f"{name}.ref_mel", (1, _REFERENCE_FRAMES, config.mel_dim), seed),
            "bos_token": bos_token,
        }
        for name, bos_token in _SPEAKERS.items()
    }
    torch.save(speakers, path)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the warnings about talker ids outside the talker's own vocabulary: the real configuration has them."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
