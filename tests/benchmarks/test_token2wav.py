# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the DiT's evaluation, on a DiT of a few thousand parameters."""

import argparse
import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni_audio_perf.benchmarks import harness, token2wav
from vllm_omni_audio_perf.benchmarks.harness import Device
from vllm_omni_audio_perf.qwen2_5_omni import BlockSparseDiT

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "emb_dim": 32,
    "look_backward_layers": [0, 2],
    "look_ahead_layers": [1, 2],
    "enc_dim": 32,
    "enc_channels": [32, 32, 32, 32, 96],
    "enc_attention_channels": 16,
    "enc_se_channels": 16,
    "enc_res2net_scale": 2,
}
FRAMES = 150  # whole blocks of 24 frames and one that is cut


def build(names: Any = token2wav.VARIANTS, implementation: str = "transformers", **settings: Any) -> Any:
    return token2wav.build_variants(names, implementation, dit_config=TINY, **settings)


@pytest.mark.parametrize("implementation", ["transformers", "vllm_omni"])
def test_all_variants_compute_the_same(implementation: str) -> None:
    if implementation == "vllm_omni":
        pytest.importorskip("vllm_omni")

    *_, rows = harness.measure(build(implementation=implementation), [2, FRAMES], 1, Device(), length_name="mel_frames")

    assert [row["mel_frames"] for row in rows] == [2, FRAMES]
    for row in rows:
        assert 0 <= row["plugin_rel_error"] == row["rel_error"] <= 1e-6
        assert row["plugin_hoisted_rel_error"] <= 1e-6


def test_the_error_would_show_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variants compute the same because they are right, not because one output is compared with itself."""
    evaluate = BlockSparseDiT.evaluate
    monkeypatch.setattr(BlockSparseDiT, "evaluate", lambda *args: evaluate(*args) * 1.01)

    *_, (row,) = harness.measure(build(["stock", "plugin"]), [FRAMES], 1, Device())

    assert row["rel_error"] == pytest.approx(0.01, rel=1e-3)


def test_an_evaluation_is_guided_and_of_the_whole_length() -> None:
    for variant in build():
        with torch.inference_mode():
            assert variant.prepare(FRAMES)().shape == (2, FRAMES, 80)


def test_only_plugin_hoisted_leaves_the_conditions_out(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    conditions = BlockSparseDiT.conditions

    def counting(self: BlockSparseDiT, *args: Any, **settings: Any) -> Any:
        computed.append(settings)
        return conditions(self, *args, **settings)

    monkeypatch.setattr(BlockSparseDiT, "conditions", counting)
    counts = {}
    for variant in build(["plugin", "plugin_hoisted"]):
        run = variant.prepare(FRAMES)
        computed.clear()
        with torch.inference_mode():
            run()
        counts[variant.name] = list(computed)

    assert counts == {"plugin": [{"guided": True}], "plugin_hoisted": []}


def test_the_seed_is_that_of_the_inputs() -> None:
    def output(seed: int) -> torch.Tensor:
        (variant,) = build(["stock"], seed=seed)
        with torch.inference_mode():
            return variant.prepare(FRAMES)()

    assert torch.equal(output(0), output(0))
    assert not torch.equal(output(0), output(1))


def test_only_stock_has_a_limit() -> None:
    limits = {variant.name: variant.up_to for variant in build(stock_up_to=100)}

    assert limits == {"stock": 100, "plugin_hoisted": None, "plugin": None}


@pytest.mark.parametrize("name", token2wav.VARIANTS)
def test_everything_is_on_the_device_asked_for(name: str) -> None:
    """The meta device stands in for CUDA: it, too, refuses to compute with a tensor that was left on the CPU."""
    (variant,) = build([name], device="meta")
    with torch.inference_mode():
        assert variant.prepare(FRAMES)().device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_variants_compute_the_same_on_cuda() -> None:
    device = Device("cuda")
    variants = build(device="cuda")
    device.apply()

    *_, (row,) = harness.measure(variants, [FRAMES], 1, device)

    assert row["rel_error"] <= 1e-5


def test_memory_comes_from_a_process_of_its_own() -> None:
    mebibytes = harness.extra_memory(
        partial(token2wav.build_variants, ["plugin"], "transformers", dit_config=TINY), "plugin", 4000, Device(), 48
    )

    assert 4000 * 64 * 4 / 2**20 < mebibytes < 500  # more than one hidden state, less than a process


@pytest.mark.parametrize("missing", ["vllm", "vllm_omni"])
def test_without_vllm_omni_stock_is_transformers_own(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert token2wav.stock_implementation() == "transformers"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert token2wav.stock_implementation() == "vllm_omni"


def test_a_module_that_cannot_be_imported_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni", None)
    assert token2wav.stock_implementation() == "transformers"


def test_the_command_runs_where_there_is_no_vllm(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    program = (
        "import sys\n"
        "sys.modules['vllm'] = sys.modules['vllm_omni'] = None  # as if not installed\n"
        "from vllm_omni_audio_perf.benchmarks import harness, token2wav\n"
        "from vllm_omni_audio_perf.cli import main\n"
        f"token2wav.DIT_CONFIG = {TINY}\n"
        "harness.extra_memory = lambda *args: 1.0\n"
        "sys.exit(main(['bench', 'token2wav', '--mel-frames', '10,50', '--pairs', '2', '--json', sys.argv[1]]))\n"
    )

    run = subprocess.run([sys.executable, "-c", program, str(result)], capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    settings, rows = (json.loads(result.read_text())[key] for key in ("settings", "rows"))
    assert settings["stock_implementation"] == "transformers"
    assert [row["mel_frames"] for row in rows] == [10, 50]
    assert max(row["rel_error"] for row in rows) <= 1e-6


@pytest.mark.parametrize(
    ("text", "expected"), [("500", [500]), ("2000,500,1000", [500, 1000, 2000]), ("2,2", [2]), ("8000", [8000])]
)
def test_lengths_ascend(text: str, expected: list[int]) -> None:
    assert token2wav.mel_frames(text) == expected


@pytest.mark.parametrize("bad", ["501", "0", "-2", "1.5", "many", "", "1e3"])
def test_a_length_that_is_not_a_positive_even_number_is_refused(bad: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        token2wav.mel_frames(f"500,{bad}")
    assert str(error.value) == (f"{bad!r} is not allowed; a length is a positive even number of mel frames (2 a code)")
