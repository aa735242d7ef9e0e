# SPDX-License-Identifier: Apache-2.0
"""Registration, as a worker process goes through it."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm_omni")

# In a process of its own: registries are global, and a worker starts from nothing.
IN_A_WORKER = """
import json, os, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
for _ in range(int(sys.argv[1])):
    import vllm_omni_audio_perf
    vllm_omni_audio_perf.register()
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm_omni.model_executor.models import OmniModelRegistry
from vllm_omni.platforms import current_omni_platform; type(current_omni_platform)
from vllm_omni_audio_perf.plugin import ARCHITECTURES
import logging
print(json.dumps({
    "multiprocessing": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING"),
    "ours": [name for name, *_ in ARCHITECTURES],
    "registries": [
        {name: f"{model.module_name}:{model.class_name}" for name, model in registry.models.items()
         if name.startswith("AudioPerf") or name in ("Qwen2_5OmniForConditionalGeneration", "MiMoAudioModel")}
        for registry in (ModelRegistry, OmniModelRegistry)
    ],
    "classes": [OmniModelRegistry.models[name].load_model_cls().__name__ for name, *_ in ARCHITECTURES],
    "checks": [MODELS_CONFIG_MAP[name].__name__ for name, *_ in ARCHITECTURES],
}))
"""


@pytest.fixture(scope="module", params=[0, 2], ids=["by entry point", "and twice more by hand"])
def worker(request: pytest.FixtureRequest) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    result = subprocess.run(
        [sys.executable, "-c", IN_A_WORKER, str(request.param)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_entry_point_group_reaches_every_process() -> None:
    """vLLM loads this group in the main process, the engine cores and the workers."""
    (own,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "audio_perf"]
    assert own.value == "vllm_omni_audio_perf:register"


def test_both_registries_know_every_architecture(worker: dict) -> None:
    for registry in worker["registries"]:
        assert set(worker["ours"]) <= set(registry)


def test_architectures_load(worker: dict) -> None:
    assert worker["classes"] == ["AudioPerfQwen2_5Omni", "AudioPerfMiMoAudio"]
    assert worker["checks"] == ["StageCheck", "StageCheck"]


def test_stock_architectures_stay_stock(worker: dict) -> None:
    for registry in worker["registries"]:
        for name in ("Qwen2_5OmniForConditionalGeneration", "MiMoAudioModel"):
            assert registry[name].startswith("vllm_omni.")


def test_plain_vllm_keeps_its_way_of_starting(worker: dict) -> None:
    assert worker["multiprocessing"] is None


WITHOUT_THE_PLUGIN = """
import json, logging
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm_omni.model_executor.models import OmniModelRegistry
from vllm_omni.platforms import current_omni_platform
names = [*ModelRegistry.models, *OmniModelRegistry.models, *MODELS_CONFIG_MAP]
print(json.dumps({
    "ours": [name for name in names if "AudioPerf" in name],
    "platform": type(current_omni_platform).__module__,
}))
"""


def test_nothing_of_ours_is_there_unless_it_is_loaded() -> None:
    """Uninstalled, or hidden by ``VLLM_PLUGINS``, the plugin leaves no trace in vLLM-Omni."""
    environment = os.environ | {"VLLM_PLUGINS": "vllm_omni_register_models"}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PLUGIN], capture_output=True, text=True, check=True, env=environment
    )
    found = json.loads(result.stdout.splitlines()[-1])
    assert not found["ours"]
    assert found["platform"].startswith("vllm_omni.")


def test_ops_and_cores_import_without_vllm() -> None:
    """A machine with torch and transformers alone can run them."""
    program = (
        "import sys; sys.modules['vllm'] = sys.modules['vllm_omni'] = None;"
        "import vllm_omni_audio_perf.ops, vllm_omni_audio_perf.qwen2_5_omni, vllm_omni_audio_perf.options,"
        " vllm_omni_audio_perf.graphs, vllm_omni_audio_perf.mimo_audio, vllm_omni_audio_perf.mimo_audio.batch_decoder,"
        " vllm_omni_audio_perf.mimo_audio.stage_inputs, vllm_omni_audio_perf.testing.upstream"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
