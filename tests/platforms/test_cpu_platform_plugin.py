# SPDX-License-Identifier: Apache-2.0
"""When the CPU platform is offered to vLLM-Omni."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from vllm_omni_audio_perf import platforms

pytest.importorskip("vllm")


def claims() -> str:
    return "somebody.elses.Platform"


def declines() -> None:
    return None


def fails() -> None:
    raise RuntimeError("no such device")


def plugin(name: str, function: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{function}", platforms.PLATFORM_PLUGINS_GROUP)


OWN = EntryPoint(
    platforms.CPU_PLATFORM_PLUGIN,
    "vllm_omni_audio_perf.platforms:cpu_platform_plugin",
    platforms.PLATFORM_PLUGINS_GROUP,
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Set which omni platform plugins are installed and what vLLM runs on."""

    def install(*plugins: EntryPoint, vllm_on_cpu: bool = True, allowed: list[str] | None = None) -> None:
        monkeypatch.setattr(platforms, "entry_points", lambda group: (OWN, *plugins))
        monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])
        monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: vllm_on_cpu))
        monkeypatch.setattr("vllm.envs.VLLM_PLUGINS", allowed, raising=False)

    return install


def test_offered_where_vllm_runs_on_cpu(installed) -> None:
    installed()
    assert platforms.cpu_platform_plugin() == platforms.CPU_PLATFORM_CLASS


def test_not_offered_where_vllm_runs_on_another_device(installed) -> None:
    installed(vllm_on_cpu=False)
    assert platforms.cpu_platform_plugin() is None


@pytest.mark.parametrize(("function", "expected"), [("claims", None), ("declines", platforms.CPU_PLATFORM_CLASS)])
def test_steps_aside_for_another_platform_that_claims_the_machine(installed, function: str, expected) -> None:
    installed(plugin("other", function))
    assert platforms.cpu_platform_plugin() == expected


def test_a_plugin_that_fails_to_detect_claims_nothing(installed) -> None:
    installed(plugin("broken", "fails"))
    assert platforms.cpu_platform_plugin() == platforms.CPU_PLATFORM_CLASS


def test_a_plugin_that_vllm_plugins_excludes_claims_nothing(installed) -> None:
    installed(plugin("other", "claims"), allowed=[platforms.CPU_PLATFORM_PLUGIN])
    assert platforms.cpu_platform_plugin() == platforms.CPU_PLATFORM_CLASS
