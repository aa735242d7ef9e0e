# SPDX-License-Identifier: Apache-2.0
"""`FixedShapeDecoder` against upstream's decode of each request alone, whatever it is padded with and batched with."""

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder
from vllm_omni_audio_perf.mimo_audio import decoder as decoder_module
from vllm_omni_audio_perf.testing.capture_safety import CaptureUnsafe, assert_capture_safe

LENGTHS = range(1, 289)
TAIL = 360
FP32, BATCHED = 1e-5, 5e-6


def random_codes(tokenizer: Any, length: int, *, rows: int | None = None, seed: int = 0) -> Tensor:
    """Valid codes ``[rows, length]``."""
    generator = torch.Generator().manual_seed(10_000 * seed + length)
    sizes = [layer._codebook.embed.shape[0] for layer in tokenizer.encoder.quantizer.vq.layers][:rows]
    return torch.stack([torch.randint(0, size, (length,), generator=generator) for size in sizes])


def padded(requests: list[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Codes ``[batch, rows, length]`` with garbage wherever there is no code, and lengths ``[batch]``."""
    generator = torch.Generator().manual_seed(length)
    codes = torch.randint(-(2**40), 2**40, (len(requests), requests[0].shape[0], length), generator=generator)
    for row, request in zip(codes, requests, strict=True):
        row[:, : request.shape[1]] = request
    return codes, torch.tensor([request.shape[1] for request in requests])


def rel_error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm."""
    assert actual.shape == expected.shape
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp_min(1e-30))


@pytest.fixture(scope="module")
def decoder(tokenizer: Any) -> FixedShapeDecoder:
    return FixedShapeDecoder(tokenizer)


@pytest.fixture(scope="module")
def references(tokenizer: Any) -> dict[int, tuple[Tensor, Tensor]]:
    """For each length the codes and upstream's decode of them alone."""
    found = {}
    for length in LENGTHS:
        codes = random_codes(tokenizer, length)
        found[length] = (codes, tokenizer.decode(codes).reshape(-1))
    return found


def check(waveform: Tensor, reference: Tensor, *, tolerance: float = FP32) -> None:
    """The waveform of a request, and nothing after it."""
    samples = len(reference)
    assert rel_error(waveform[:samples], reference) <= tolerance
    assert rel_error(waveform[:samples][-TAIL:], reference[-TAIL:]) <= tolerance
    assert not waveform[samples:].any()


def test_every_length_at_any_padding(decoder: FixedShapeDecoder, references: dict) -> None:
    numbers = random.Random(1)
    for length, (codes, reference) in references.items():
        for total in {length, length + 1, length + numbers.randrange(2, 60)}:
            waveforms, counts = decoder.decode(*padded([codes], total))
            assert waveforms.shape == (1, total * 960)
            assert waveforms.dtype == torch.float32
            assert counts.tolist() == [len(reference)]
            check(waveforms[0], reference)


def test_every_length_in_mixed_batches(decoder: FixedShapeDecoder, references: dict) -> None:
    """Beside others of any length; as alone, and as upstream."""
    lengths = list(LENGTHS)
    random.Random(2).shuffle(lengths)
    for start in range(0, len(lengths), 6):
        batch = lengths[start : start + 6]
        codes, valid = padded([references[length][0] for length in batch], max(batch) + start % 5)
        waveforms, counts = decoder.decode(codes, valid)
        assert counts.tolist() == [960 * length for length in batch]
        for waveform, length in zip(waveforms, batch, strict=True):
            check(waveform, references[length][1])
            alone, _ = decoder.decode(*padded([references[length][0]], length))
            assert rel_error(waveform[: len(alone[0])], alone[0]) <= BATCHED


def test_requests_without_codes_are_silent_and_disturb_nobody(decoder: FixedShapeDecoder, references: dict) -> None:
    codes, lengths = padded([references[40][0]] * 3, 50)
    lengths[0] = lengths[2] = 0
    waveforms, counts = decoder.decode(codes, lengths)
    assert counts.tolist() == [0, 40 * 960, 0]
    assert not waveforms[0].any()
    assert not waveforms[2].any()
    check(waveforms[1], references[40][1])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_any_number_of_code_rows(decoder: FixedShapeDecoder, tokenizer: Any, rows: int) -> None:
    codes = random_codes(tokenizer, 30, rows=rows)
    waveforms, _ = decoder.decode(*padded([codes], 37))
    check(waveforms[0], tokenizer.decode(codes).reshape(-1))


@pytest.mark.parametrize(
    "changes",
    [
        {"avg_pooler": 1},
        {"avg_pooler": 3},
        {"decoder_causal": False},
        {"decoder_attn_window_size": [10, -1]},
        {"decoder_attn_window_size": [10, 0]},
        {"decoder_attn_window_size": [0, 3]},
        {"decoder_attn_window_size": [7, 5], "decoder_causal": False},
        {"decoder_attn_window_size": [-1, 2], "decoder_causal": False},
        {"vocoder_attn_window_size": [0, 0]},
        {"vocoder_attn_window_size": [0, 10]},
        {"vocoder_attn_window_size": [40, 0]},
        {"vocoder_attn_window_size": [-1, -1]},
        {"vocoder_attn_window_size": [-1, 10]},
        {"vocoder_attn_window_size": [40, -1]},
        {"vocoder_attn_window_size": [3, 300]},
        {"ln_type": "RMSNorm"},
        {"activation_function": "silu"},
        {"decoder_kernel_size": 4},
        {"decoder_kernel_size": 2},
        {"nfft": 480, "window_size": 480},
        {"rope_theta": 500},
    ],
    ids=str,
)
def test_every_setting(make_tokenizer: Any, changes: dict) -> None:
    tokenizer = make_tokenizer(**changes)
    decoder = FixedShapeDecoder(tokenizer)
    lengths = [1, 2, 13, 70, 131]
    requests = [random_codes(tokenizer, length) for length in lengths]
    waveforms, counts = decoder.decode(*padded(requests, 140))
    for request, waveform, count in zip(requests, waveforms, counts.tolist(), strict=True):
        reference = tokenizer.decode(request).reshape(-1)
        assert count == len(reference)
        check(waveform, reference)


def test_bfloat16_is_as_exact_as_upstreams(make_tokenizer: Any) -> None:
    """The error against float32, beside that of upstream's own bfloat16."""
    import copy

    exact = make_tokenizer(vocoder_num_layers=3)
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    decoder = FixedShapeDecoder(rounded)
    assert decoder.dtype == torch.bfloat16
    for length, clips in ((1, 6), (5, 6), (24, 2), (96, 2), (200, 1)):
        requests = [random_codes(exact, length, seed=seed) for seed in range(clips)]
        together, _ = decoder.decode(*padded(requests, length + 7))
        errors: dict[str, list[float]] = {"upstream": [], "together": [], "alone": []}
        for request, waveform in zip(requests, together, strict=True):
            reference = exact.decode(request).reshape(-1)
            (alone,), _ = decoder.decode(*padded([request], length + 3))
            for name, actual in (
                ("upstream", rounded.decode(request).float().reshape(-1)),
                ("together", waveform[: len(reference)]),
                ("alone", alone[: len(reference)]),
            ):
                errors[name].append(rel_error(actual, reference))
        # What rounding does to a single code is chance, so a mean over some.
        upstreams, *ours = (sum(found) / clips for found in errors.values())
        assert max(ours) <= 1.2 * upstreams


def test_weights_are_those_of_the_tokenizer(decoder: FixedShapeDecoder, tokenizer: Any) -> None:
    theirs = dict(tokenizer.named_parameters()) | dict(tokenizer.named_buffers())
    ours = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    assert len(ours) > 50
    for name, tensor in ours.items():
        assert tensor is theirs[name]


def test_frozen_weights_stay_frozen(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(decoder_layers=1)
    tokenizer.requires_grad_(False)
    tokenizer.decoder.dconv2.requires_grad_(True)
    FixedShapeDecoder(tokenizer)
    trainable = {name for name, parameter in tokenizer.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".dconv2.")[0] for name in trainable} == {"decoder"}


def test_is_built_without_upstream(tokenizer: Any, decoder: FixedShapeDecoder) -> None:
    """From the settings alone, with torch alone, and with upstream's weights the same function."""
    program = (
        "import sys; sys.modules['vllm'] = sys.modules['vllm_omni'] = sys.modules['transformers'] = None;"
        "import torch; from vllm_omni_audio_perf.mimo_audio import FixedShapeDecoder;"
        "d = FixedShapeDecoder.from_config({'d_model': 32, 'decoder_attention_heads': 2, 'decoder_ffn_dim': 8,"
        " 'vocoder_dim': 16, 'vocoder_num_layers': 1, 'decoder_layers': 1, 'num_quantizers': 2}, dtype=torch.bfloat16);"
        "[torch.nn.init.normal_(p) for p in d.parameters()]; [b.normal_() for b in d.buffers()];"
        "w, n = d.decode(torch.zeros(2, 2, 5, dtype=torch.long), torch.tensor([5, 3]));"
        "assert w.shape == (2, 5 * 480) and n.tolist() == [2400, 1440] and d.dtype == torch.bfloat16"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    other = FixedShapeDecoder.from_config(tokenizer.config)
    other.load_state_dict(decoder.state_dict())
    codes = random_codes(tokenizer, 20)
    assert torch.equal(other.decode(*padded([codes], 22))[0], decoder.decode(*padded([codes], 22))[0])


def test_default_settings_are_upstreams() -> None:
    upstream = pytest.importorskip("vllm_omni.model_executor.models.mimo_audio.config_mimo_audio")
    theirs, ours = upstream.MiMoAudioTokenizerConfig(), decoder_module.decoder_settings({})
    theirs.codebook_size *= theirs.num_quantizers  # upstream fills them up when it builds the codebooks
    for name in decoder_module.DEFAULTS:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "yarn"}, "rope_type is 'yarn'; allowed: default"),
        ({"vocoder_padding": "center"}, "vocoder_padding is 'center'; allowed: same"),
        ({"ln_type": "BatchNorm"}, "ln_type is 'BatchNorm'; allowed: LayerNorm, RMSNorm"),
        ({"activation_function": "sine"}, "activation_function is 'sine'; allowed: gelu"),
        ({"nfft": 200}, "nfft is 200; allowed: more than hop_length, which is 240, by an even number"),
        ({"nfft": 961}, "nfft is 961; allowed"),
        ({"d_model": 100}, "d_model is 100; allowed: a multiple of twice decoder_attention_heads, which is 12"),
        ({"decoder_kernel_size": 1}, "decoder_kernel_size is 1; allowed: at least decoder_stride_size, which is 2"),
    ],
)
def test_settings_that_are_not_supported_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixedShapeDecoder.from_config(changes)


@pytest.mark.parametrize(
    ("codes", "lengths", "message"),
    [
        (torch.zeros(5, 3, dtype=torch.long), torch.tensor([3]), r"shape \(5, 3\); allowed: \(batch, rows, codes\)"),
        (torch.zeros(1, 6, 3, dtype=torch.long), torch.tensor([3]), "with 1 to 5 rows"),
        (torch.zeros(1, 5, 0, dtype=torch.long), torch.tensor([0]), "at least one code"),
        (
            torch.zeros(1, 5, 3, dtype=torch.long),
            torch.tensor([3, 3]),
            r"lengths have the shape \(2,\); allowed: \(1,\)",
        ),
        (torch.zeros(1, 5, 3), torch.tensor([3]), "codes are torch.float32; allowed: torch.int64"),
        (torch.zeros(1, 5, 3, dtype=torch.long), torch.tensor([3.0]), "lengths are torch.float32"),
        (torch.zeros(1, 5, 3, dtype=torch.long, device="meta"), torch.tensor([3]), "codes are on meta; allowed: cpu"),
    ],
)
def test_bad_arguments_are_named(decoder: FixedShapeDecoder, codes: Tensor, lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder.decode(codes, lengths)


@pytest.mark.parametrize("length", [5, 64, 300])
def test_a_decode_can_be_captured(decoder: FixedShapeDecoder, tokenizer: Any, length: int) -> None:
    """Where the vocoder attends densely and where it attends in blocks. Upstream's decode cannot."""
    codes, lengths = padded([random_codes(tokenizer, length)] * 2, length)
    assert_capture_safe(decoder, [codes, lengths], method="decode_fixed")
    with pytest.raises(CaptureUnsafe):
        assert_capture_safe(tokenizer, [codes[0]], method="decode")


def varlen_reference(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, _: Tensor, *__: int, causal: bool, window_size: Any
) -> Tensor:
    """``flash_attn_varlen_func`` the slow and obvious way: query by query."""
    out = torch.zeros_like(query)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        for position in range(begin, end):
            left, right = window_size
            first = begin if left < 0 else max(begin, position - left)
            last = end if right < 0 else min(end, position + right + 1)
            last = min(last, position + 1) if causal else last
            scores = torch.einsum("hd,khd->hk", query[position], key[first:last]) / query.shape[-1] ** 0.5
            out[position] = torch.einsum("hk,khd->hd", scores.softmax(-1), value[first:last])
    return out


def test_flash_attention_gives_the_same_audio(
    tokenizer: Any, references: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[0].shape[0])
        return varlen_reference(*args, **kwargs)

    monkeypatch.setattr(decoder_module, "load_flash_attention", lambda: counting)
    decoder = FixedShapeDecoder(tokenizer, flash_attention=True)
    codes, lengths = padded([references[9][0], references[2][0], references[9][0]], 12)
    lengths[2] = 0
    decoder.decode_varlen(codes, lengths)
    assert not calls  # on a CPU, and in float32
    monkeypatch.setattr(FixedShapeDecoder, "_can_use_flash_attention", lambda self: True)
    waveforms, counts = decoder.decode_varlen(codes, lengths)
    assert set(calls) == {2 * (9 + 2), 4 * (9 + 2)}  # valid frames only, of the decoder's and the vocoder's layers
    assert counts.tolist() == [9 * 960, 2 * 960, 0]
    check(waveforms[0], references[9][1])
    check(waveforms[1], references[2][1])
    assert not waveforms[2].any()


def test_flash_attention_that_is_missing_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError, match="flash-attn cannot be imported; install it, or leave flash_attention off"):
        FixedShapeDecoder(tokenizer, flash_attention=True)
    FixedShapeDecoder(tokenizer)
