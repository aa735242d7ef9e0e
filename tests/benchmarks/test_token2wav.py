# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the DiT's evaluation, on a DiT of a few thousand parameters. Nothing here asserts a time."""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from vllm_omni_audio_perf.benchmarks import harness, token2wav
from vllm_omni_audio_perf.benchmarks.block_sparse_dit import BlockSparseDiT
from vllm_omni_audio_perf.benchmarks.harness import Device
from vllm_omni_audio_perf.cli import main
from vllm_omni_audio_perf.token2wav import BlockDiT, dit

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
EVALUATIONS = [name for name in token2wav.VARIANTS if name != "matmul_floor"]
SAME = {"block_sparse", "hoisted", "plugin"}  # as stock, but for rounding


def build(names: Any = token2wav.VARIANTS, implementation: str = "transformers", **settings: Any) -> Any:
    return token2wav.build_variants(names, implementation, dit_config=TINY, **settings)


@pytest.mark.parametrize("implementation", ["transformers", "vllm_omni"])
def test_all_variants_compute_the_same(implementation: str) -> None:
    if implementation == "vllm_omni":
        pytest.importorskip("vllm_omni")

    *_, rows = harness.measure(
        build(implementation=implementation), [2, FRAMES], 1, Device(), length_name="mel_frames", about="plugin"
    )

    assert [row["mel_frames"] for row in rows] == [2, FRAMES]
    for row in rows:
        assert {name for name in token2wav.VARIANTS if 0 <= row.get(f"{name}_rel_error", 1) <= 1e-6} == SAME
        assert row["rel_error"] == row["plugin_rel_error"]
        assert 1e-4 < row["plugin_bfloat16_rel_error"] < 2e-2  # another function, and near
        assert "matmul_floor_rel_error" not in row


@pytest.mark.parametrize("name", sorted(SAME))
def test_the_error_would_show_a_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variants compute the same because they are right, not because one output is compared with itself."""
    of = {"plugin": (BlockDiT, "evaluate"), "block_sparse": (BlockSparseDiT, "_attend")}
    of["hoisted"] = (BlockSparseDiT, "evaluate_hoisted")
    owner, method = of[name]
    whole = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args: whole(*args) * 1.01)

    *_, (row,) = harness.measure(build(["stock", name]), [FRAMES], 1, Device(), about="plugin")

    error = row["rel_error" if name == "plugin" else f"{name}_rel_error"]
    assert 1e-3 < error < 0.02
    assert name == "block_sparse" or error == pytest.approx(0.01, rel=1e-3)


def test_an_evaluation_is_guided_and_of_the_whole_length() -> None:
    for variant in build(EVALUATIONS):
        with torch.inference_mode():
            assert variant.prepare(FRAMES)().shape == (2, FRAMES, 80)


@contextmanager
def calls_of_modules() -> Iterator[list[tuple[Any, tuple[int, ...]]]]:
    """Each module called inside, with the shape of its first positional input."""
    calls: list[tuple[Any, tuple[int, ...]]] = []
    hook = register_module_forward_pre_hook(
        lambda module, inputs: calls.append((module, tuple(inputs[0].shape) if inputs else ()))
    )
    try:
        yield calls
    finally:
        hook.remove()


def calls_of_a_run(variant: harness.Variant) -> list[tuple[Any, tuple[int, ...]]]:
    run = variant.prepare(FRAMES)
    with torch.inference_mode(), calls_of_modules() as calls:
        run()
    return calls


def test_what_an_evaluation_computes_again() -> None:
    """The one with nothing but its attention replaced all that stock does, the others nothing but the layers."""
    constant = {"DiTTimestepEmbedding", "DiTCodecEmbedding", "ECAPA_TimeDelayNet", "Qwen2_5OmniDiTRotaryEmbedding"}
    computed = {}
    for variant in build(EVALUATIONS):
        modules = [module for module, _ in calls_of_a_run(variant)]
        modulations = sum(getattr(module, "out_features", 0) == 6 * TINY["hidden_size"] for module in modules)
        computed[variant.name] = ({type(module).__name__ for module in modules} & constant, modulations)

    everything, nothing = (constant, TINY["num_hidden_layers"]), (set(), 0)
    assert computed == {
        "stock": everything,
        "block_sparse": everything,
        "hoisted": nothing,
        "plugin": nothing,
        "plugin_bfloat16": nothing,
    }


def of_the_layers(variant: harness.Variant) -> Counter[tuple[Any, tuple[int, ...]]]:
    """The calls of linear modules in a run, but for that of the output projection."""
    return Counter(
        (module, shape)
        for module, shape in calls_of_a_run(variant)
        if isinstance(module, torch.nn.Linear) and module.out_features != 80
    )


def test_the_floor_is_the_matrix_products_of_an_evaluation() -> None:
    floor, plugin = build(["matmul_floor", "plugin"])

    calls = of_the_layers(floor)

    assert calls == of_the_layers(plugin)
    assert set(calls.values()) == {1}
    assert len(calls) == TINY["num_hidden_layers"] * 6  # query, key, value, output, and two of the feed-forward
    assert {shape[:2] for _, shape in calls} == {(2 * 7, 24)}


def test_the_floor_has_the_groups_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dit, "CPU_INTERMEDIATE_BYTES", 4 * 3 * 64 * 24 * 4)  # of four blocks
    floor, plugin = build(["matmul_floor", "plugin"])

    calls, expected = of_the_layers(floor), of_the_layers(plugin)

    assert {shape[0] for _, shape in calls} == {4, 2}
    frames: Counter[Any] = Counter()
    for (module, shape), count in calls.items():
        frames[module] += count * shape[0] * shape[1]
    assert set(frames.values()) == {2 * 7 * 24}
    # A layer that looks ahead projects the block after a group with it, too, which the floor does not.
    differing = {module for module, _ in calls - expected}
    assert len(differing) == 3 * len(TINY["look_ahead_layers"])
    assert calls.total() == expected.total()


def test_the_floor_is_compared_round_by_round_and_the_smallest_counts() -> None:
    names = ["stock", "plugin", "matmul_floor"]
    seconds = {(8, "stock"): [9.0] * 7, (8, "plugin"): [4.0, 3.0, 9.0, 8.0, 6.0, 6.0, 5.0]}
    seconds[8, "matmul_floor"] = [2.0, 2.0, 1.0, 2.0, 2.0, 4.0, 2.0]

    (row,) = harness.summarize(names, seconds, {}, about="plugin", ratios=token2wav.ratios(names))

    assert (row["plugin_over_matmul_floor"], row["plugin_over_matmul_floor_median"]) == (1.5, 2.5)
    assert row["speedup"] == row["plugin_speedup"] == 1.5
    table = harness.table([row], names, "length", about="plugin", ratios=token2wav.ratios(names))
    assert re.search(r"plugin: times matmul_floor's, smallest +\| +1.50x ", table)
    assert re.search(r"plugin: times matmul_floor's, median +\| +2.50x ", table)

    fewer = {cell: values[:6] for cell, values in seconds.items()}
    (row,) = harness.summarize(names, fewer, {}, about="plugin", ratios=token2wav.ratios(names))
    assert "plugin_over_matmul_floor" not in row


def test_each_technique_is_compared_with_the_one_before() -> None:
    seconds = {(8, name): [2.0 ** (9 - index)] for index, name in enumerate(token2wav.TECHNIQUES)}

    (row,) = harness.summarize(
        token2wav.TECHNIQUES, seconds, {}, about="plugin", ratios=token2wav.ratios(token2wav.TECHNIQUES)
    )

    assert row["speedup"] == row["plugin_speedup"] == 8
    assert row["plugin_bfloat16_speedup"] == 16
    assert {
        field: value for field, value in row.items() if "_over_" in field and field[-4:] not in ("_min", "_max")
    } == {
        "hoisted_speedup_over_block_sparse": 2,
        "plugin_speedup_over_hoisted": 2,
        "plugin_bfloat16_speedup_over_plugin": 2,
        "plugin_speedup_over_block_sparse": 4,
    }


@pytest.mark.parametrize("implementation", ["transformers", "vllm_omni"])
def test_bfloat16_is_of_the_same_weights_in_a_copy(implementation: str) -> None:
    if implementation == "vllm_omni":
        pytest.importorskip("vllm_omni")

    def weights(dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        model = token2wav.build_token2wav(implementation, "cpu", dit_config=TINY, linear_dtype=dtype)
        parameters = model.code2wav_dit_model.named_parameters()
        return {name: tensor for name, tensor in parameters if "qkv_proj" not in name}  # vLLM has packed those

    whole, rounded = weights(None), weights(torch.bfloat16)

    cast = {name for name, tensor in rounded.items() if tensor.dtype == torch.bfloat16}
    assert cast == {name for name in whole if re.search(r"transformer_blocks\.\d+\.(attn|ff)\.", name)}
    for name, tensor in rounded.items():
        assert torch.equal(whole[name].to(tensor.dtype), tensor), name


def test_the_seed_is_that_of_the_inputs() -> None:
    def output(seed: int) -> torch.Tensor:
        (variant,) = build(["stock"], seed=seed)
        with torch.inference_mode():
            return variant.prepare(FRAMES)()

    assert torch.equal(output(0), output(0))
    assert not torch.equal(output(0), output(1))


def test_only_stock_has_a_limit() -> None:
    limits = {variant.name: variant.up_to for variant in build(stock_up_to=100)}

    assert limits == {"stock": 100} | dict.fromkeys(token2wav.VARIANTS[1:])


@pytest.mark.parametrize("name", EVALUATIONS)
def test_everything_is_on_the_device_asked_for(name: str) -> None:
    """The meta device stands in for CUDA: it, too, refuses to compute with a tensor that was left on the CPU."""
    (variant,) = build([name], device="meta")
    with torch.inference_mode():
        assert variant.prepare(FRAMES)().device.type == "meta"


def test_the_floor_is_on_the_device_asked_for() -> None:
    (variant,) = build(["matmul_floor"], device="meta")
    with torch.inference_mode():
        assert variant.prepare(FRAMES)() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_variants_compute_the_same_on_cuda() -> None:
    device = Device("cuda")
    variants = build(device="cuda")
    device.apply()

    *_, (row,) = harness.measure(variants, [FRAMES], 1, device, about="plugin")

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


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures a small DiT of transformers' own."""
    monkeypatch.setattr(token2wav, "DIT_CONFIG", TINY)
    monkeypatch.setattr(token2wav, "stock_implementation", lambda: "transformers")
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM"):  # the command sets them, unless they are
        monkeypatch.setenv(name, "")


def test_all_variants_and_the_waterfall_in_one_run(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ",".join(token2wav.VARIANTS)
    options = ["--mel-frames", "10,50", "--variants", names, "--no-memory"]
    files = ["--json", str(tmp_path / "x.json"), "--waterfall", str(tmp_path / "x.png")]

    assert main(["bench", "token2wav", *options, *files]) == 0

    result = json.loads((tmp_path / "x.json").read_text())
    assert result["command"] == f"vllm-omni-audio-perf bench token2wav {' '.join(options)}".replace(
        f"--variants {names} --no-memory", f"--no-memory --variants {names}"
    )
    assert result["settings"]["memory"] is None
    for row in result["rows"]:
        assert row["plugin_over_matmul_floor"] <= row["plugin_over_matmul_floor_median"]
        assert row["plugin_rel_error"] == row["rel_error"] <= 1e-6 < row["plugin_bfloat16_rel_error"]
        assert "plugin_extra_mib" not in row
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    out = capsys.readouterr().out
    for title in ("plugin_bfloat16: relative error to stock", "plugin: times matmul_floor's, smallest"):
        assert title in out


def test_the_waterfall_is_of_the_longest_length_that_all_bars_have(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(harness, "waterfall", lambda row, names, path, title: drawn.append((row, names, title)))

    arguments = ["--mel-frames", "10,20,40", "--stock-up-to", "20", "--pairs", "1", "--no-memory"]
    assert main(["bench", "token2wav", *arguments, "--waterfall", str(tmp_path / "x.png")]) == 0

    ((row, names, title),) = drawn
    assert row["mel_frames"] == 20
    assert names == ["stock", "block_sparse", "plugin"]
    assert "DiT, 20 mel frames\n" in title


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "plugin,matmul_floor", "--pairs", "6"], "--pairs 6: matmul_floor needs at least 7"),
        (
            ["--variants", "plugin,matmul_floor", "--waterfall", "x.png"],
            "--waterfall needs --variants with at least two",
        ),
        (["--stock-up-to", "400", "--waterfall", "x.png"], "--waterfall: no length is within --stock-up-to 400"),
        (["--waterfall", "x.pdf"], "--waterfall x.pdf: it takes a file that ends in .png"),
        (["--waterfall", "missing/x.png"], "--waterfall missing/x.png: there is no folder missing"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_built(
    arguments: list[str],
    message: str,
    tiny: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    built: list[Any] = []
    monkeypatch.setattr(token2wav, "build_variants", lambda *args, **settings: built.append(args))

    assert main(["bench", "token2wav", *arguments]) == 2

    assert message in capsys.readouterr().err
    assert built == []
