# SPDX-License-Identifier: Apache-2.0
"""Random MiMo-Audio checkpoints with the files, names, ids and vocabularies of the real two repositories, in small.

The folder is XiaomiMiMo/MiMo-Audio-7B-Instruct, its subfolder `audio_tokenizer` XiaomiMiMo/MiMo-Audio-Tokenizer. They
run through vLLM-Omni's pipeline like the real ones. Nothing is trained, so what is said is random characters, and what
is heard is noise at the level of speech that changes with the codes. In the audio tokenizer every parameter is random,
biases and normalisations included, so that an implementation that drops or misplaces one is found out.

The language model keeps to MiMo-Audio's order of tokens:

- After `<|sostm|>` it speaks: five characters and five groups of codes in turn, then `<|eot|>`, then groups alone, then
  `<|eostm|>`; 30 to 70 groups in all.
- After `</think>` it writes some dozen characters and `<|im_end|>`.
- After `<think>`, or where nothing of this follows `assistant`, it writes some dozen characters and `<|sostm|>`.

How a random language model is made to do so: channel 0 of the residual stream holds one large constant, which the first
layer writes and no other changes. After the final norm it is 1, and column 0 of the output head acts as the bias that
the head lacks; it puts every unwanted token out of reach. Some tokens carry a mark in a channel of their own, and in
the next layers the one attention head looks for marks instead of at random: whether the token five positions ago was a
group, which of the marked tokens came last, and how near that is. What the heads find shifts the logits of the few
tokens that give a reply its order.
"""

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_omni_audio_perf.testing.byte_tokenizer import PRINTABLE_IDS, byte_id, save_byte_tokenizer
from vllm_omni_audio_perf.testing.checkpoint_writing import (
    MARKER_FILE,
    normal,
    replaced_folder,
    save_weights,
    write_json,
)

__all__ = ["AUDIO_TOKENIZER_FOLDER", "MARKER_FILE", "STEPS", "make_checkpoint", "usage"]

_Weights = dict[str, torch.Tensor]

# Where the audio tokenizer lies in the checkpoint's folder.
AUDIO_TOKENIZER_FOLDER = "audio_tokenizer"

# What `make_checkpoint` reports to its `progress` argument, in this order.
STEPS = ("language model", "audio tokenizer", "text tokenizer")

# --------------------------------------------------------------------------------------------------------------------
# Tokens. Ids and texts are those of the real tokenizer; vLLM-Omni hard-codes several of them.
# --------------------------------------------------------------------------------------------------------------------

_SPECIAL_TOKENS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|object_ref_start|>": 151646,
    "<|object_ref_end|>": 151647,
    "<|box_start|>": 151648,
    "<|box_end|>": 151649,
    "<|quad_start|>": 151650,
    "<|quad_end|>": 151651,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<|sosp|>": 151665,
    "<|eosp|>": 151666,
    "<|empty|>": 151667,
    "<|Human|>": 151668,
    "<|SpeechLM|>": 151669,
    "<|sostm|>": 151670,
    "<|eostm|>": 151671,
    "<|eot|>": 151672,
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
_VOCABULARY = 151680

_TEXT_PAD = _SPECIAL_TOKENS["<|endoftext|>"]
_TEXT_START = _SPECIAL_TOKENS["<|im_start|>"]
_TEXT_END = _SPECIAL_TOKENS["<|im_end|>"]
_GROUP = _SPECIAL_TOKENS["<|empty|>"]  # stands for a group of codes
_SPEECH_START = _SPECIAL_TOKENS["<|sostm|>"]
_SPEECH_TEXT_END = _SPECIAL_TOKENS["<|eot|>"]
_SPEECH_END = _SPECIAL_TOKENS["<|eostm|>"]

# "/" is how the model tells `</think>` from `<think>`, which are no tokens of their own, so it writes none itself.
_SLASH = byte_id(ord("/"))
_CHARACTERS = tuple(token for token in PRINTABLE_IDS if token != _SLASH)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' or 'audio' in part or 'audio_url' in part or 'input_audio' in part %}"
    "<|sosp|><|empty|><|eosp|>"
    "{% elif 'text' in part %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<|sostm|>{% endif %}"
)

# --------------------------------------------------------------------------------------------------------------------
# Configuration
# --------------------------------------------------------------------------------------------------------------------

_GROUP_SIZE = 4  # codes of each codebook in a group
_CODEBOOK_SIZES = (1024, 1024, *[128] * 6)  # of the codebooks that the language model speaks
_CHANNELS = len(_CODEBOOK_SIZES)

_WIDTH = 128
_HEAD_DIM = 128  # vLLM-Omni's rotary sections are for this size
_INTERMEDIATE = 256
_LAYERS = 8  # the head of the first writes the constant, those of the next five look for marks
_ROPE_THETA = 640000
_LOCAL_WIDTH = 64
_LOCAL_LAYERS = 2
_LOCAL_INTERMEDIATE = 128

_LANGUAGE_CONFIG: dict[str, Any] = {
    "architectures": ["MiMoAudioModel"],
    "model_type": "qwen2",
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _LAYERS,
    "max_window_layers": _LAYERS,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-06,
    "rope_theta": _ROPE_THETA,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "use_sliding_window": False,
    "bos_token_id": _TEXT_PAD,
    "eos_token_id": _TEXT_END,
    "torch_dtype": "bfloat16",
    "transformers_version": transformers.__version__,  # without it the tokenizer is taken for an old Mistral's
    # What follows is MiMo-Audio's own. The last id of each speech vocabulary stands for "no code".
    "speech_vocab_size": "-".join(str(size + 1) for size in _CODEBOOK_SIZES),
    "speech_zeroemb_idx": "-".join(map(str, _CODEBOOK_SIZES)),
    "delay_pattern": "-".join(map(str, range(_CHANNELS))),
    "group_size": _GROUP_SIZE,
    "audio_channels": _CHANNELS,
    "local_dim": _LOCAL_WIDTH,
    "local_layers": _LOCAL_LAYERS,
    "local_attn_heads": 2,
    "local_ffn_dim": _LOCAL_INTERMEDIATE,
    "local_attn_dropout": 0.1,
    "input_local_layers": 1,
    "input_local_dim": _LOCAL_WIDTH,
    "input_full_attention": True,
}

_NUM_QUANTIZERS = 20  # the tokenizer's own; the language model uses the first eight
_TOKENIZER_CONFIG: dict[str, Any] = {
    "architectures": ["MiMoAudioTokenizer"],
    "model_type": "mimo_audio_tokenizer",
    "torch_dtype": "float32",
    "max_audio_seconds": 1800,
    "stride_size": 2,
    "avg_pooler": 2,
    "d_model": 64,
    "scale_embedding": False,
    "kernel_size": 3,
    "activation_function": "gelu",
    "encoder_layers": 2,
    "encoder_skip_layer_id": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "encoder_causal": False,
    "encoder_attn_window_size": [-1, -1],
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 128,
    "decoder_kernel_size": 3,
    "decoder_stride_size": 2,
    "decoder_causal": True,
    "decoder_attn_window_size": [-1, -1],
    "nfft": 960,
    "vocoder_dim": 64,
    "vocoder_intermediate_dim": 128,
    "vocoder_num_layers": 2,
    "vocoder_attention_heads": 2,
    "vocoder_attn_window_size": [40, 10],
    "vocoder_padding": "same",
    "n_mels": 32,
    "sampling_rate": 24000,
    "hop_length": 240,
    "window_size": 960,
    "fmin": 0,
    "fmax": None,
    "num_quantizers": _NUM_QUANTIZERS,
    "codebook_size": [1024, 1024, *[128] * (_NUM_QUANTIZERS - 2)],
    "threshold_ema_dead_code": 2,
    "position_embedding_type": "rope",
    "rope_theta": 10000,
    "rope_type": "default",
    "ln_type": "LayerNorm",
}

# --------------------------------------------------------------------------------------------------------------------
# Language model: the order of a reply
# --------------------------------------------------------------------------------------------------------------------

# Channels of the residual stream that are not random.
_BIAS = 0  # the constant
# Marks, each 1 at its token, else 0.
_IS_START, _IS_SLASH, _IS_SPEECH_START, _IS_SPEECH_TEXT_END, _IS_GROUP = range(1, 6)
# What the heads for marks find.
_GROUP_BEFORE = 6  # 1 where the token five before the next one is a group
_SPEECH_JUST_BEGAN = 7  # 1 in the first five tokens after `<|sostm|>`
_AFTER_START, _AFTER_SLASH, _AFTER_SPEECH_START, _AFTER_SPEECH_TEXT_END = range(8, 12)  # 1 for the last marked token
_NEARNESS = 12  # 1 near the last marked token, 0 far from it
_TAIL_NEARNESS = 13  # the same for `<|eot|>`
_FINDINGS = list(range(_GROUP_BEFORE, _TAIL_NEARNESS + 1))
_RESERVED = list(range(_TAIL_NEARNESS + 1))

_MARKS = {
    _TEXT_START: _IS_START,
    _SLASH: _IS_SLASH,
    _SPEECH_START: _IS_SPEECH_START,
    _SPEECH_TEXT_END: _IS_SPEECH_TEXT_END,
    _GROUP: _IS_GROUP,
}

_INTERLEAVED = 5  # tokens of each kind in turn


def _window(strength: float, first: int, ramp: int, last: int) -> dict[int, float]:
    """Return strengths of rotary frequencies (by index) whose attention score falls with the logarithm of the distance.

    The score a distance d away is the sum of strength * cos(frequency * d). The frequencies are a geometric series, so
    that the score falls by `strength` / ln(ratio) with each factor e of the distance; the ramp at the fast end keeps it
    from rippling.
    """
    return {index: strength * min(1.0, (index - first + 1) / ramp) for index in range(first, last + 1)}


@dataclass(frozen=True)
class _MarkHead:
    """An attention head that looks for marks.

    Attributes:
        window: index of a rotary frequency to strength, see `_window`.
        copies: channels that it reads to channels that it writes.
        distance: how many positions back the window has its maximum.
        mark_scores: channel of a mark to the attention score that it adds at any distance.
    """

    window: Mapping[int, float]
    copies: Mapping[int, int]
    distance: int = 0
    mark_scores: Mapping[int, float] = field(default_factory=dict)


# The heads of the layers after the first. Strengths and scores are tuned so that the first one sees exactly one
# position, the second stops seeing `<|sostm|>` between 5 and 6 positions, the third finds the last mark, telling
# `<|sostm|>` from the `<|im_start|>` 11 positions before it and from an earlier turn, and the others report 1/2 after
# some 45 tokens and some 10.
_MARK_HEADS = (
    _MarkHead(
        window={**_window(12.0, 0, 1, 5), **_window(3.0, 6, 1, 25)},
        distance=_INTERLEAVED - 1,
        copies={_IS_GROUP: _GROUP_BEFORE},
    ),
    _MarkHead(
        window=_window(6.9, 4, 1, 36),
        mark_scores={_IS_SPEECH_START: 43.4},
        copies={_IS_SPEECH_START: _SPEECH_JUST_BEGAN},
    ),
    _MarkHead(
        window=_window(6.0, 10, 14, 40),
        mark_scores={_IS_START: 190.0, _IS_SLASH: 190.0, _IS_SPEECH_START: 195.0, _IS_SPEECH_TEXT_END: 200.0},
        copies={
            _IS_START: _AFTER_START,
            _IS_SLASH: _AFTER_SLASH,
            _IS_SPEECH_START: _AFTER_SPEECH_START,
            _IS_SPEECH_TEXT_END: _AFTER_SPEECH_TEXT_END,
        },
    ),
    _MarkHead(
        window=_window(0.6, 4, 12, 40),
        mark_scores={_IS_START: 8.9, _IS_SLASH: 8.9, _IS_SPEECH_START: 8.9},
        copies={_IS_START: _NEARNESS, _IS_SLASH: _NEARNESS, _IS_SPEECH_START: _NEARNESS},
    ),
    _MarkHead(
        window=_window(0.9, 4, 12, 40),
        mark_scores={_IS_SPEECH_TEXT_END: 5.1},
        copies={_IS_SPEECH_TEXT_END: _TAIL_NEARNESS},
    ),
)

_CHARACTER_LOGIT = 5.0  # mean; positive, so that a repetition penalty lowers it by a constant
_CHARACTER_LOGIT_STD = 2.0  # over contexts
_END_LOGIT_STD = 1.0
_UNREACHABLE_LOGIT = -30.0

# Logits by channel of the tokens that give a reply its order. They add up like conditions that all have to hold: with
# one missing, the token stays far below the characters, which have logits up to 10.
_ORDER_LOGITS: dict[int, dict[int, float]] = {
    # 28 where a group is due, beyond the reach of every character; -28 or less elsewhere. Upstream's model and its
    # sampler decide apart from each other whether a group is next, and the margin makes them agree.
    _GROUP: {
        _BIAS: -30.0,
        _AFTER_SPEECH_START: 58.0,
        _AFTER_SPEECH_TEXT_END: 114.0,
        _GROUP_BEFORE: -56.0,
        _SPEECH_JUST_BEGAN: -56.0,
    },
    _SPEECH_START: {_BIAS: -30.0, _AFTER_START: 41.0, _NEARNESS: -12.0},
    _TEXT_END: {_BIAS: -30.0, _AFTER_SLASH: 41.0, _NEARNESS: -12.0},
    _SPEECH_TEXT_END: {_BIAS: -30.0, _AFTER_SPEECH_START: 41.0, _NEARNESS: -12.0},
    # Against the 28 of a group.
    _SPEECH_END: {_BIAS: -30.0, _AFTER_SPEECH_TEXT_END: 60.0, _TAIL_NEARNESS: -20.0},
}

# --------------------------------------------------------------------------------------------------------------------
# Language model: weights
# --------------------------------------------------------------------------------------------------------------------

# The constant in terms of the RMS that a norm divides by. Large against the random channels: the RMS hardly varies, and
# the bias logits stay put.
_CONSTANT_RMS = 8.0
_CONSTANT = round(_CONSTANT_RMS * math.sqrt(_WIDTH))  # an integer up to 256 is exact in bfloat16
_LOCAL_CONSTANT = round(_CONSTANT_RMS * math.sqrt(_LOCAL_WIDTH))

# Variance that a layer's random attention and its MLP add to the random channels, which begin with 1. Measured.
_ATTENTION_VARIANCE = 0.5
_MLP_VARIANCE = 0.075
_LOCAL_ATTENDED_VARIANCE, _LOCAL_FINAL_VARIANCE = 2.3, 2.45  # in the transformer over a group

# Gains of matrices, by a part of the name; 1, which preserves the variance, elsewhere.
_GAINS = {
    # Peaky enough for attention to tell tokens apart.
    ".self_attn.q_proj.": 1.5,
    ".self_attn.k_proj.": 1.5,
    # Makes up for the averaging of attention.
    ".self_attn.o_proj.": 1.5,
    ".mlp.down_proj.": 0.5,  # its outputs have heavy tails
    "local_transformer_lm_heads.": 3.0,
}
_BIAS_STD = 0.1
_NORM_STD = 0.1


def _language_shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the real repository for this module's sizes."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, _WIDTH),
        "model.norm.weight": (_WIDTH,),
        "lm_head.weight": (_VOCABULARY, _WIDTH),
        "speech_group_downcast.weight": (_WIDTH, _LOCAL_WIDTH * _GROUP_SIZE),
        "hidden_states_downcast.weight": (_LOCAL_WIDTH, _WIDTH),
        "local_transformer.norm.weight": (_LOCAL_WIDTH,),
        "input_local_transformer.norm.weight": (_LOCAL_WIDTH,),
    }
    for index in range(_LAYERS):
        shapes |= _layer_shapes(f"model.layers.{index}.", _WIDTH, _INTERMEDIATE)
    for index in range(_LOCAL_LAYERS):
        shapes |= _layer_shapes(f"local_transformer.layers.{index}.", _LOCAL_WIDTH, _LOCAL_INTERMEDIATE)
    shapes |= _layer_shapes("input_local_transformer.layers.0.", _LOCAL_WIDTH, 4 * _LOCAL_WIDTH)
    for index, size in enumerate(_CODEBOOK_SIZES):
        shapes[f"speech_embeddings.{index}.weight"] = (size + 1, _LOCAL_WIDTH)
        shapes[f"local_transformer_lm_heads.{index}.weight"] = (size + 1, _LOCAL_WIDTH)
    return shapes


def _layer_shapes(prefix: str, width: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """Return those of one Qwen2 layer whose heads together are as wide as the layer."""
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}self_attn.o_proj.weight": (width, width)}
    for name in ("q_proj", "k_proj", "v_proj"):
        shapes[f"{prefix}self_attn.{name}.weight"] = (width, width)
        shapes[f"{prefix}self_attn.{name}.bias"] = (width,)
    for name in ("gate_proj", "up_proj"):
        shapes[f"{prefix}mlp.{name}.weight"] = (intermediate, width)
    shapes[f"{prefix}mlp.down_proj.weight"] = (width, intermediate)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = (width,)
    return shapes


def _language_weights(seed: int) -> _Weights:
    """Return the parameters of the language model, bfloat16."""
    weights = {name: _random_tensor(name, shape, seed) for name, shape in _language_shapes().items()}
    _wire_embeddings(weights)
    _wire_decoder(weights)
    _wire_head(weights["lm_head.weight"])
    _wire_groups(weights)
    weights["hidden_states_downcast.weight"][:, _RESERVED] = 0
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def _random_tensor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the random start of a parameter, float32."""
    noise = normal(name, shape, seed)
    if name.endswith(".bias"):
        return noise.mul_(_BIAS_STD)
    if len(shape) == 1:  # the weight of a norm
        return noise.mul_(_NORM_STD).add_(1)
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.startswith("speech_embeddings."):  # the embeddings of all codebooks are added up
        noise[-1] = 0
        return noise.mul_(_CHANNELS**-0.5)
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    return noise.mul_(gain / math.sqrt(math.prod(shape[1:])))


def _wire_embeddings(weights: _Weights) -> None:
    """Give the tokens their marks, in place."""
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[:, _RESERVED] = 0
    for token, mark in _MARKS.items():
        embeddings[token, mark] = 1


def _wire_decoder(weights: _Weights) -> None:
    """Set the heads for marks and the norms, in place."""
    variance = 1.0
    for index in range(_LAYERS):
        layer = f"model.layers.{index}."
        for projection in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"{layer}{projection}.weight"][_RESERVED] = 0
        _scale_norm(weights[f"{layer}input_layernorm.weight"], variance)
        if index == 0:
            _wire_constant(weights, f"{layer}self_attn.")
        elif index <= len(_MARK_HEADS):
            weights[f"{layer}input_layernorm.weight"][list(_MARKS.values())] = math.hypot(
                _CONSTANT_RMS, math.sqrt(variance)
            )
            _wire_mark_head(weights, f"{layer}self_attn.", _MARK_HEADS[index - 1])
        else:
            variance += _ATTENTION_VARIANCE
        _scale_norm(weights[f"{layer}post_attention_layernorm.weight"], variance)
        variance += _MLP_VARIANCE

    final = weights["model.norm.weight"]
    _scale_norm(final, variance)
    rms = math.hypot(_CONSTANT_RMS, math.sqrt(variance))
    final[_BIAS] = rms / _CONSTANT
    final[_FINDINGS] = rms


def _scale_norm(weight: torch.Tensor, variance: float, reserved: Sequence[int] = _RESERVED) -> None:
    """Make a norm bring random channels of this variance beside the constant to 1, and the others to 0, in place."""
    weight.mul_(math.sqrt((_CONSTANT_RMS**2 + variance) / variance))
    weight[reserved] = 0


def _wire_constant(weights: _Weights, attention: str) -> None:
    """Make an attention layer write the constant and nothing else, in place.

    A value that is the same everywhere stays so, whatever is attended to. It could come with the embeddings, too, but
    upstream has zeros in their place where it loses audio: a prompt that is read while another request speaks.
    """
    _clear(weights, attention)
    weights[f"{attention}v_proj.bias"][0] = 1
    weights[f"{attention}o_proj.weight"][_BIAS, 0] = _CONSTANT


def _clear(weights: _Weights, attention: str) -> None:
    """Set an attention layer to zero, in place."""
    for name in ("q_proj", "k_proj", "v_proj"):
        weights[f"{attention}{name}.weight"].zero_()
        weights[f"{attention}{name}.bias"].zero_()
    weights[f"{attention}o_proj.weight"].zero_()


def _wire_mark_head(weights: _Weights, attention: str, head: _MarkHead) -> None:
    """Turn the one head of an attention layer into a head for marks, in place."""
    _clear(weights, attention)
    query, key = (weights[f"{attention}{name}.bias"] for name in ("q_proj", "k_proj"))
    # Components i and i + half turn together. Where a query and a key are the same at all positions, their rotations
    # alone make the difference; an angle between them moves the maximum.
    half = _HEAD_DIM // 2
    for index, strength in head.window.items():
        angle = _ROPE_THETA ** (-index / half) * head.distance
        query[index] = amplitude = _amplitude(strength)
        key[index], key[index + half] = amplitude * math.cos(angle), amplitude * math.sin(angle)
    if head.mark_scores:
        # The slowest rotation hardly turns: through it the marks get their scores at any distance.
        query[half - 1] = amplitude = _amplitude(max(head.mark_scores.values()))
        for mark, score in head.mark_scores.items():
            weights[f"{attention}k_proj.weight"][half - 1, mark] = _amplitude(score) ** 2 / amplitude
    output = weights[f"{attention}o_proj.weight"]
    for component, (source, target) in enumerate(head.copies.items()):
        weights[f"{attention}v_proj.weight"][component, source] = 1
        output[target, component] = 1


def _amplitude(score: float) -> float:
    """Return the size of a query component and a key component that together give this attention score."""
    return math.sqrt(score * math.sqrt(_HEAD_DIM))


def _wire_head(head: torch.Tensor) -> None:
    """Give the output head (vocabulary, width) its biases, in place."""
    head.mul_(_CHARACTER_LOGIT_STD)
    head[:, _RESERVED] = 0
    head[:, _BIAS] = _UNREACHABLE_LOGIT
    head[list(_CHARACTERS), _BIAS] = _CHARACTER_LOGIT
    for token, logits in _ORDER_LOGITS.items():
        head[token] *= _END_LOGIT_STD / _CHARACTER_LOGIT_STD
        for channel, logit in logits.items():
            head[token, channel] = logit


def _wire_groups(weights: _Weights) -> None:
    """Make the embedding of a group of codes carry the mark of a group, in place.

    None of the layers on the way to it has a bias, except for the attention of the input transformer: it writes a
    constant, as the first layer of the decoder does.
    """
    layer = "input_local_transformer.layers.0."
    for index in range(_CHANNELS):
        weights[f"speech_embeddings.{index}.weight"][:, _BIAS] = 0
    value, output = weights[f"{layer}self_attn.v_proj.weight"], weights[f"{layer}self_attn.o_proj.weight"]
    value[_BIAS] = 0
    weights[f"{layer}self_attn.v_proj.bias"][_BIAS] = 1
    output[_BIAS] = 0
    output[:, _BIAS] = 0
    output[_BIAS, _BIAS] = _LOCAL_CONSTANT
    weights[f"{layer}mlp.down_proj.weight"][_BIAS] = 0
    attended, final = (
        weights[f"{norm}.weight"] for norm in (f"{layer}post_attention_layernorm", "input_local_transformer.norm")
    )
    _scale_norm(attended, _LOCAL_ATTENDED_VARIANCE, [_BIAS])
    _scale_norm(final, _LOCAL_FINAL_VARIANCE, [_BIAS])
    final[_BIAS] = math.hypot(_CONSTANT_RMS, math.sqrt(_LOCAL_FINAL_VARIANCE)) / _LOCAL_CONSTANT

    downcast = weights["speech_group_downcast.weight"]
    downcast[_RESERVED] = 0
    constants = downcast.view(_WIDTH, _GROUP_SIZE, _LOCAL_WIDTH)[:, :, _BIAS]
    constants.zero_()
    constants[_IS_GROUP] = 1 / _GROUP_SIZE


# --------------------------------------------------------------------------------------------------------------------
# Audio tokenizer
# --------------------------------------------------------------------------------------------------------------------

_CODEBOOK_DECAY = 0.7  # of the codebooks' sizes from one to the next: each codes what the ones before it left over
_TOKENIZER_GAINS = {
    ".self_attn.q_proj.": 1.25,
    ".self_attn.k_proj.": 1.25,
    ".self_attn.out_proj.": 1.0,
    ".fc2.": 1.0,
}

# Spectrum of the sound, as natural logarithms of magnitudes. The vocoder clips above ln(100) = 4.6.
_LOG_MAGNITUDE_LOW, _LOG_MAGNITUDE_HIGH = 1.4, -1.8  # at 0 and at 12 kHz
_LOG_MAGNITUDE_STD = 0.7  # over time
_LOUDNESS_STD = 0.2  # over time, of what all frequencies have in common
_PHASE_STD = 2.0  # radians, over time


def _tokenizer_shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the real repository for this module's sizes."""
    config = _TOKENIZER_CONFIG
    width, mels, kernel = config["d_model"], config["n_mels"], config["kernel_size"]
    vocoder = config["vocoder_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (width, mels, kernel),
        "encoder.conv1.bias": (width,),
        "encoder.conv2.weight": (width, width, kernel),
        "encoder.conv2.bias": (width,),
        "encoder.down_sample_layer.0.weight": (width, width, config["avg_pooler"]),
        "decoder.dconv1.conv.weight": (width, width, config["avg_pooler"]),
        "decoder.dconv1.conv.bias": (width,),
        "decoder.dconv2.conv.weight": (width, mels, config["decoder_kernel_size"]),
        "decoder.dconv2.conv.bias": (mels,),
        "decoder.vocoder.embeddings.weight": (vocoder, mels),
        "decoder.vocoder.head.out.weight": (config["nfft"] + 2, vocoder),
        "decoder.vocoder.head.out.bias": (config["nfft"] + 2,),
        "decoder.vocoder.head.istft.window": (config["nfft"],),
    }
    norms = {
        "encoder.layer_norm": width,
        "encoder.down_sample_norm": width,
        "decoder.layer_norm": width,
        "decoder.dconv1.norm": width,
        "decoder.dconv2.norm": mels,
        "decoder.vocoder.layer_norm": vocoder,
    }
    stacks = [
        ("encoder.", config["encoder_layers"], width, config["encoder_ffn_dim"]),
        ("decoder.", config["decoder_layers"], width, config["decoder_ffn_dim"]),
        ("decoder.vocoder.", config["vocoder_num_layers"], vocoder, config["vocoder_intermediate_dim"]),
    ]
    for prefix, layers, dim, intermediate in stacks:
        for layer in (f"{prefix}layers.{index}." for index in range(layers)):
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes[f"{layer}self_attn.{name}.weight"] = (dim, dim)
                if name != "k_proj":
                    shapes[f"{layer}self_attn.{name}.bias"] = (dim,)
            shapes[f"{layer}fc1.weight"], shapes[f"{layer}fc1.bias"] = (intermediate, dim), (intermediate,)
            shapes[f"{layer}fc2.weight"], shapes[f"{layer}fc2.bias"] = (dim, intermediate), (dim,)
            norms |= {f"{layer}self_attn_layer_norm": dim, f"{layer}final_layer_norm": dim}
    for norm, dim in norms.items():
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (dim,)
    for index, size in enumerate(config["codebook_size"]):
        codebook = f"encoder.quantizer.vq.layers.{index}._codebook."
        shapes[f"{codebook}inited"], shapes[f"{codebook}cluster_size"] = (1,), (size,)
        shapes[f"{codebook}embed"] = shapes[f"{codebook}embed_avg"] = (size, width)
    return shapes


def _tokenizer_weights(seed: int) -> _Weights:
    """Return the parameters and buffers of the audio tokenizer, float32."""
    weights = {name: _random_tokenizer_tensor(name, shape, seed) for name, shape in _tokenizer_shapes().items()}
    for index in range(_NUM_QUANTIZERS):
        codebook = f"encoder.quantizer.vq.layers.{index}._codebook."
        weights[f"{codebook}inited"] = torch.ones(1)
        weights[f"{codebook}cluster_size"] = torch.ones_like(weights[f"{codebook}cluster_size"])
        weights[f"{codebook}embed"].mul_(_CODEBOOK_DECAY**index)
        weights[f"{codebook}embed_avg"] = weights[f"{codebook}embed"].clone()
    # The level of a log mel is large beside its changes: kernels that add up to zero leave it out.
    convolution = weights["encoder.conv1.weight"]
    convolution.sub_(convolution.mean(dim=(1, 2), keepdim=True))

    weights["decoder.vocoder.head.istft.window"] = torch.hann_window(_TOKENIZER_CONFIG["nfft"]).clone()  # not a view
    magnitude_weight, phase_weight = weights["decoder.vocoder.head.out.weight"].chunk(2)
    magnitude_bias, phase_bias = weights["decoder.vocoder.head.out.bias"].chunk(2)
    magnitude_weight.mul_(_LOG_MAGNITUDE_STD)
    loudness = normal("loudness", magnitude_weight.shape[1:], seed)
    magnitude_weight.add_(loudness * (_LOUDNESS_STD / math.sqrt(len(loudness))))
    magnitude_bias.add_(torch.linspace(_LOG_MAGNITUDE_LOW, _LOG_MAGNITUDE_HIGH, len(magnitude_bias)))
    phase_weight.mul_(_PHASE_STD)
    phase_bias.mul_(math.pi / _BIAS_STD)
    return weights


def _random_tokenizer_tensor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the random start of a parameter, float32."""
    noise = normal(name, shape, seed)
    if name.endswith((".embed", ".embed_avg")):
        return noise
    if name.endswith(".bias"):
        return noise.mul_(_BIAS_STD)
    if len(shape) == 1:  # the weight of a norm
        return noise.mul_(_NORM_STD).add_(1)
    gain = next((gain for part, gain in _TOKENIZER_GAINS.items() if part in name), 1.0)
    return noise.mul_(gain / math.sqrt(math.prod(shape[1:])))


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------


def make_checkpoint(
    path: str | os.PathLike[str], *, seed: int = 0, progress: Callable[[str], None] | None = None
) -> Path:
    """Write a random MiMo-Audio checkpoint: the language model, and the audio tokenizer in a subfolder.

    The same arguments give the same bytes with the same versions of torch and safetensors. The caller's random state is
    left alone.

    Args:
        path: the folder to write. It may exist if it is empty, or if it is an earlier random checkpoint, which is
            replaced. An interrupted run leaves no checkpoint there.
        seed: any integer.
        progress: called with each element of `STEPS` when that step begins.

    Returns:
        The folder, about 90 MB.

    Raises:
        FileExistsError: `path` is a file, or a folder with other contents.
    """
    target = Path(path)
    with replaced_folder(target) as directory:
        _write(directory, seed, progress or (lambda step: None))
    return target


def usage(path: Path) -> str:
    """Return the shell command that tells vLLM-Omni where the audio tokenizer of a checkpoint is."""
    return f"export MIMO_AUDIO_TOKENIZER_PATH={shlex.quote(str(path.absolute() / AUDIO_TOKENIZER_FOLDER))}"


def _write(directory: Path, seed: int, report: Callable[[str], None]) -> None:
    report("language model")
    write_json(directory / "config.json", _LANGUAGE_CONFIG)
    generation = {"eos_token_id": [_TEXT_END, _TEXT_PAD], "pad_token_id": _TEXT_PAD, "do_sample": False}
    write_json(directory / "generation_config.json", generation)
    save_weights(directory, _language_weights(seed))

    report("audio tokenizer")
    audio_tokenizer = directory / AUDIO_TOKENIZER_FOLDER
    audio_tokenizer.mkdir()
    write_json(audio_tokenizer / "config.json", _TOKENIZER_CONFIG)
    save_weights(audio_tokenizer, _tokenizer_weights(seed))

    report("text tokenizer")
    save_byte_tokenizer(
        directory,
        special_tokens=_SPECIAL_TOKENS,
        plain_tokens=_PLAIN_TOKENS,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        named_tokens={},
        chat_template=_CHAT_TEMPLATE,
    )
    write_json(directory / MARKER_FILE, {"model": "mimo_audio", "seed": seed})
