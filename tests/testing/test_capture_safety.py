# SPDX-License-Identifier: Apache-2.0
"""What `assert_capture_safe` must flag and what it must let pass."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_omni_audio_perf.testing.capture_safety import CaptureUnsafe, assert_capture_safe, find_violations

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch that is built with CUDA")

READ = "read back to the host"
COPY = "copy from the host"
SHAPE = "shape that depends on values"
BOOLEAN = "assignment through a boolean index"
OPERAND = "operand on the host"
RANDOM = "random numbers"


def assign(index: Callable[[Tensor], Any], value: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def function(x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone()
        x[index(mask)] = value(x) if callable(value) else value
        return x

    return function


# Each of x [4, 8] float and mask [4, 8] bool, both on the device.
UNSAFE: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "item": (READ, lambda x, mask: x * x.sum().item()),
    "float()": (READ, lambda x, mask: x * float(x.sum())),
    "int()": (READ, lambda x, mask: x[: int(mask.sum())]),
    "if": (READ, lambda x, mask: x * 2 if x.sum() > 0 else x),
    "tolist": (READ, lambda x, mask: x.split(mask[0].long().tolist())),
    "equal": (READ, lambda x, mask: x * torch.equal(x, x)),
    "allclose": (READ, lambda x, mask: x * torch.allclose(x, x)),
    "cpu": (READ, lambda x, mask: x + x.cpu().to(x.device)),
    "to cpu": (READ, lambda x, mask: (x + 1).to("cpu", non_blocking=True)),
    "copy_ to the host": (READ, lambda x, mask: torch.empty(4, 8).copy_(x)),
    "one_hot": (READ, lambda x, mask: F.one_hot(mask.long())),
    "istft": (READ, lambda x, mask: torch.istft(torch.fft.rfft(x).T.contiguous(), 8, window=x.new_ones(8))),
    "list to tensor": (COPY, lambda x, mask: x * torch.tensor([1.0] * 8, device=x.device)),
    "number to tensor": (COPY, lambda x, mask: x * torch.tensor(2.0, device=x.device)),
    "to the device": (COPY, lambda x, mask: x * torch.arange(8).to(x.device)),
    "numpy to the device": (COPY, lambda x, mask: x * torch.from_numpy(np.ones(8)).to(x.device)),
    "copy_ from the host": (COPY, lambda x, mask: x.clone().copy_(torch.zeros(4, 8))),
    "one element set": (COPY, assign(lambda mask: (0, 0), 1.0)),
    "list as index": (COPY, lambda x, mask: x[[0, 1]]),
    "nonzero": (SHAPE, lambda x, mask: mask.nonzero()),
    "where of one": (SHAPE, lambda x, mask: torch.where(mask)),
    "boolean index": (SHAPE, lambda x, mask: x[mask]),
    "masked_select": (SHAPE, lambda x, mask: x.masked_select(mask)),
    "unique": (SHAPE, lambda x, mask: x.unique()),
    "unique_consecutive": (SHAPE, lambda x, mask: torch.unique_consecutive(x)),
    "bincount": (SHAPE, lambda x, mask: torch.bincount(mask[0].long(), minlength=2)),
    "repeat_interleave": (SHAPE, lambda x, mask: x.repeat_interleave(mask[:, 0].long(), dim=0)),
    "boolean index set to a tensor": (BOOLEAN, assign(lambda mask: mask, lambda x: x.new_zeros(()))),
    "boolean index put": (BOOLEAN, lambda x, mask: x.index_put((mask,), x.new_zeros(()))),
    "operand": (OPERAND, lambda x, mask: x + torch.arange(8)),
    "numpy operand": (OPERAND, lambda x, mask: x + torch.from_numpy(np.ones(8, dtype=np.float32))),
    "index on the host": (OPERAND, lambda x, mask: x[torch.arange(2)]),
    "mask on the host": (OPERAND, lambda x, mask: x.masked_fill(torch.ones(4, 8, dtype=torch.bool), 0.0)),
    "rand": (RANDOM, lambda x, mask: x + torch.rand(8, device=x.device)),
    "randn_like": (RANDOM, lambda x, mask: x + torch.randn_like(x)),
    "normal_": (RANDOM, lambda x, mask: x.clone().normal_()),
    "randperm": (RANDOM, lambda x, mask: x[torch.randperm(4, device=x.device)]),
    "multinomial": (RANDOM, lambda x, mask: torch.multinomial(x.softmax(-1), 1)),
    "bernoulli": (RANDOM, lambda x, mask: torch.bernoulli(x.sigmoid())),
    "dropout": (RANDOM, lambda x, mask: F.dropout(x, 0.1, training=True)),
    "attention dropout": (RANDOM, lambda x, mask: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
    "random numbers of the host": (RANDOM, lambda x, mask: x * torch.rand(())),
    "output on the host": ("output on the host", lambda x, mask: (x + 1, torch.zeros(3))),
    "nothing": ("no operator seen", lambda x, mask: x),
    "numpy": ("the call failed", lambda x, mask: (x + 1).numpy()),
    "an error": ("the call failed", lambda x, mask: (x + 1) @ x),
}

SAFE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arithmetic": lambda x, mask: (x * 2 + 1).exp().clamp(max=3.0),
    "where with a number": lambda x, mask: torch.where(mask, x, 0.0),
    "masked_fill": lambda x, mask: x.masked_fill(mask, -torch.inf),
    "constant of the code": lambda x, mask: x * torch.tensor(2.0),
    "made on the device": lambda x, mask: x + torch.arange(8, device=x.device) + torch.full((8,), 2.0, device=x.device),
    "new_zeros": lambda x, mask: x.new_zeros(4, 8) + torch.zeros_like(x),
    "slice set to a number": assign(lambda mask: (slice(None), 0), 1.0),
    "boolean index set to a number": assign(lambda mask: mask, 0.0),
    "index of integers": lambda x, mask: x[mask[:, 0].long()],
    "index put of integers": lambda x, mask: x.index_put((mask[:, 0].long(),), x[0]),
    "gather": lambda x, mask: x.gather(1, mask.long()),
    "scatter": lambda x, mask: x.scatter(1, mask.long(), 0.0),
    "cumsum, sort": lambda x, mask: (x.cumsum(1), *x.sort(dim=1)),
    "repeat_interleave of known size": lambda x, mask: x.repeat_interleave(mask[:, 0].long(), dim=0, output_size=4),
    "repeat_interleave by a number": lambda x, mask: x.repeat_interleave(3, dim=1),
    "embedding": lambda x, mask: F.embedding(mask.long(), x),
    "shape of the input": lambda x, mask: x.view(2, -1)[:, : x.shape[0]],
    "dropout of nothing": lambda x, mask: F.dropout(x, 0.0, training=True),
    "dropout in evaluation": lambda x, mask: F.dropout(x, 0.5, training=False) + 1,
    "attention": lambda x, mask: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "masked attention": lambda x, mask: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], attn_mask=mask[None, None, :, :4]
    ),
    "irfft, fold": lambda x, mask: F.fold(
        torch.fft.irfft(x[None].to(torch.complex64), 14, dim=2).transpose(1, 2), (1, 20), (1, 14), stride=(1, 2)
    ),
    "stft": lambda x, mask: torch.stft(x, 4, window=torch.hann_window(4, device=x.device), return_complex=True),
    "convolutions": lambda x, mask: F.conv_transpose1d(F.conv1d(x[None], x[:, :4, None]), x[:, :4, None], stride=2),
    "group norm": lambda x, mask: F.group_norm(x[None], 2),
    "another dtype": lambda x, mask: x.to(torch.bfloat16).float() + mask.to(x.dtype),
    "linear algebra": lambda x, mask: torch.linalg.vector_norm(x @ x.T),
}


def example() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 8), torch.ones(4, 8, dtype=torch.bool)


@pytest.mark.parametrize("name", UNSAFE)
def test_flags(name: str) -> None:
    kind, snippet = UNSAFE[name]
    violations = find_violations(snippet, example())
    assert kind in [violation.kind for violation in violations]
    if kind != "the call failed":
        assert all(violation.kind != "the call failed" for violation in violations)
    with pytest.raises(CaptureUnsafe, match=kind):
        assert_capture_safe(snippet, example())


@pytest.mark.parametrize("name", SAFE)
def test_lets_pass(name: str) -> None:
    assert find_violations(SAFE[name], example()) == []
    expected = SAFE[name](*example())
    result = assert_capture_safe(SAFE[name], example())
    if isinstance(expected, tuple):
        expected, result = expected[0], result[0]
    assert result.device.type == "cuda"
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype


def two_faults(x: Tensor) -> Tensor:
    x = x + torch.rand_like(x)
    return x + torch.arange(8)


def test_message_lists_kind_operator_and_line() -> None:
    first_line = inspect.getsourcelines(two_faults)[1]
    with pytest.raises(CaptureUnsafe) as caught:
        assert_capture_safe(two_faults, example()[:1])
    assert str(caught.value).splitlines() == [
        f"random numbers: aten.rand_like.default at {__file__}:{first_line + 1} `x = x + torch.rand_like(x)`",
        f"operand on the host: aten.add.Tensor at {__file__}:{first_line + 2} `return x + torch.arange(8)`",
    ]


def test_error_of_the_call_is_the_cause() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("some key")

    with pytest.raises(CaptureUnsafe, match="KeyError: 'some key'") as caught:
        assert_capture_safe(fails, example()[:1])
    assert isinstance(caught.value.__cause__, KeyError)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.plain = torch.arange(8.0)
        self.number = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.linear(x)[None])[0] + self.table

    def uses_plain(self, x: Tensor) -> Tensor:
        return x + self.plain

    def uses_number(self, x: Tensor) -> Tensor:
        return x * self.number

    def reads(self, x: Tensor) -> float:
        return self(x).sum().item()


@pytest.mark.parametrize(
    "call",
    [
        lambda module, x: find_violations(module, [x]),
        lambda module, x: find_violations(module, [x], method="forward"),
        lambda module, x: find_violations(module.forward, [x]),
        lambda module, x: find_violations(lambda m, y: m(y), [module, x]),
        lambda module, x: find_violations(functools.partial(module.forward, x=x)),
        lambda module, x: find_violations(SimpleNamespace(modules={"one": [module]}, run=module.forward).run, [x]),
    ],
)
def test_module_and_its_methods(call: Callable[[nn.Module, Tensor], list[Any]]) -> None:
    module = Module().eval()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    assert call(module, example()[0]) == []
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name])
    assert type(module.table) is Tensor


class Holder:
    """Like a module, without being one."""

    def __init__(self) -> None:
        self.parts = {"module": [Module().eval()]}
        self.table = torch.arange(8.0)
        self.itself = self

    def run(self, x: Tensor) -> Tensor:
        return self.parts["module"][0](x) + self.table


def test_object_that_holds_modules() -> None:
    assert_capture_safe(Holder(), example()[:1], method="run")
    assert_capture_safe(Holder().run, example()[:1])


@pytest.mark.parametrize("method", ["uses_plain", "uses_number"])
def test_plain_attribute_of_a_module_stays_on_the_host(method: str) -> None:
    violations = find_violations(Module(), example()[:1], method=method)
    assert [violation.kind for violation in violations] == [OPERAND]


def test_method_that_reads_back() -> None:
    with pytest.raises(CaptureUnsafe, match=rf"{READ}: aten._local_scalar_dense.*`return self\(x\).sum\(\).item\(\)`"):
        assert_capture_safe(Module().eval(), example()[:1], method="reads")


def test_tensor_from_a_closure() -> None:
    x, _ = example()
    violations = find_violations(lambda y: x + y, [x])
    assert [violation.kind for violation in violations] == ["tensor that is no input and not part of the module"]


def test_tied_weights_stay_tied() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = module[0].weight
    assert_capture_safe(lambda m, x: m(x) if m[1].weight is m[0].weight else None, [module, example()[0]])


def test_needs_a_torch_built_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(RuntimeError, match=r"built with CUDA, not .* needs no GPU"):
        assert_capture_safe(nn.Identity(), example()[:1])


@pytest.fixture(scope="module")
def mimo_tokenizer() -> Any:
    """Upstream's audio tokenizer, small."""
    config_module = pytest.importorskip("vllm_omni.model_executor.models.mimo_audio.config_mimo_audio")
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    config = config_module.MiMoAudioTokenizerConfig(
        avg_pooler=2,
        d_model=64,
        encoder_layers=1,
        encoder_skip_layer_id=None,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=128,
        nfft=960,
        vocoder_dim=64,
        vocoder_intermediate_dim=128,
        vocoder_num_layers=2,
        n_mels=32,
        window_size=960,
        hop_length=240,
        num_quantizers=8,
        codebook_size=[1024, 1024, *[128] * 6],
        threshold_ema_dead_code=2,
        vocoder_attention_heads=2,
        scale_embedding=False,
    )
    return MiMoAudioTokenizer(config).float().eval()


def test_flags_upstreams_decode(mimo_tokenizer: Any) -> None:
    codes = torch.zeros(8, 12, dtype=torch.long)
    with pytest.raises(CaptureUnsafe) as caught:
        assert_capture_safe(mimo_tokenizer, [codes], method="decode")
    assert "modeling_audio_tokenizer.py" in str(caught.value)
    assert COPY in str(caught.value)


def test_lets_upstreams_decode_of_fixed_shape_pass(mimo_tokenizer: Any) -> None:
    codes = torch.zeros(8, 12, dtype=torch.long)
    waveform = assert_capture_safe(mimo_tokenizer, [codes, 16], method="decode_fixed")
    assert waveform.device.type == "cuda"
    assert waveform.shape[-1] >= 16 * 4 * 240
