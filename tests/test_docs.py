# SPDX-License-Identifier: Apache-2.0
"""Every command in the documentation goes through the parser of the program that it calls."""

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_audio_perf import cli, stage_configs_index
from vllm_omni_audio_perf.options import MiMoAudioOptions, Token2WavOptions

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS += sorted(ROOT.glob("examples/**/README.md"))
HEADERS = [*sorted(ROOT.glob("stage_configs/*.yaml")), *sorted(ROOT.glob("examples/**/*.py"))]
"""Files that say in comments or docstrings how to call them."""
SUBSTITUTION = re.compile(r'"?\$\(vllm-omni-audio-perf (configs \w+)\)"?')


def commands_of(document: Path) -> Iterator[str]:
    """The commands in ``sh`` blocks, and those in running text that name a program and its arguments."""
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        command = ""
        for line in block.replace("\\\n", " ").splitlines():
            command += line
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a quotation goes on in the next line
                command += "\n"
                continue
            if words:
                yield command
            command = ""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for span in re.findall(r"`([^`]+)`", prose):
        words = span.split()
        if len(words) > 1 and words[0] in ("./dev", "vllm-omni-audio-perf") and not re.search(r"\b[A-Z]{3,}\b", span):
            yield span


def commands_in_headers(file: Path) -> list[str]:
    """The lines that begin with a program and name a file or a model."""
    return re.findall(r"^[# ]*((?:vllm-omni serve|python examples/)\S* .+)$", file.read_text(encoding="utf-8"), re.M)


COMMANDS = [(document, command) for document in DOCUMENTS for command in commands_of(document)]
COMMANDS += [(file, command) for file in HEADERS for command in commands_in_headers(file)]


def test_finds_the_commands() -> None:
    programs = {shlex.split(command)[0] for _, command in COMMANDS}
    assert {"./dev", "vllm-omni", "vllm-omni-audio-perf", "python", "pip", "uv", "curl"} <= programs
    assert len(COMMANDS) > 20
    assert {file.suffix for file, _ in COMMANDS} == {".md", ".yaml", ".py"}


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=[command.split("\n")[0] for _, command in COMMANDS])
def test_command(document: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for configs in SUBSTITUTION.findall(command):
        parse_ours(configs.split())
    program, *arguments = shlex.split(SUBSTITUTION.sub("config.yaml", command), comments=True)
    if program == "vllm-omni":
        parse_vllm_omni(arguments, monkeypatch)
    elif program == "vllm-omni-audio-perf":
        parse_ours(arguments)
    elif program == "./dev":
        parse_dev(arguments, monkeypatch)
    elif program == "python":
        script = ROOT / arguments[0]
        # The documentation of an example changes into its folder first.
        parse_script(script if script.is_file() else document.parent / arguments[0], arguments[1:], monkeypatch)
    elif program in ("pip", "uv"):
        check_extras(command)
    elif program.endswith(".sh"):
        script = (ROOT / program).read_text(encoding="utf-8")
        for option in re.findall(r"--[\w-]+", " ".join(arguments)):
            assert option in script
    elif program == "curl":
        check_body(command)
    else:
        assert program in ("cd", ".", "export"), f"no parser is known for {command!r}"


def parse_ours(arguments: list[str]) -> Any:
    args = cli._build_parser().parse_args(arguments)
    if getattr(args, "command", None) == "configs" and args.name:
        stage_configs_index.stage_config_path(args.name)
    return args


def parse_vllm_omni(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM-Omni's own entry point, up to where the server would start."""
    pytest.importorskip("vllm_omni")
    from vllm_omni.entrypoints.cli import main, serve

    parsed: list[Any] = []
    monkeypatch.setattr(serve.OmniServeCommand, "validate", lambda self, args: None)  # looks the model up on the hub
    monkeypatch.setattr(serve.OmniServeCommand, "cmd", staticmethod(parsed.append))
    monkeypatch.setattr(sys, "argv", ["vllm-omni", *arguments])
    main.main()
    assert parsed[0].deploy_config == "config.yaml"


def parse_script(script: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm_omni")
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.delitem(sys.modules, "queries", raising=False)  # each offline example has its own beside it
    parse_args = runpy.run_path(str(script))["parse_args"]
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # files of the reader's own
    parse_args(arguments)


def parse_dev(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = arguments
    if name in ("demo", "demo-mimo"):
        model = "qwen2_5_omni" if name == "demo" else "mimo_audio"
        parse_script(ROOT / f"examples/offline_inference/{model}/end2end.py", arguments, monkeypatch)
    elif name == "vllm-omni-audio-perf":
        parse_ours(arguments)
    elif name == "test":
        markers = set(re.findall(r"\w+", arguments[1] if arguments[:1] == ["-m"] else "")) - {"not", "and", "or"}
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        known = {marker.split(":")[0] for marker in settings["tool"]["pytest"]["ini_options"]["markers"]}
        assert arguments[:1] in ([], ["-m"]) or (ROOT / arguments[0]).exists()
        assert markers <= known
    else:
        assert name == "lint" or (Path(sys.executable).parent / name).exists(), name


def check_extras(command: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in re.findall(r"\[([\w-]+)\]|--extra ([\w-]+)", command):
        assert (extra[0] or extra[1]) in extras


def check_body(command: str) -> None:
    """The body of a chat completion has no field that vLLM-Omni would not know."""
    pytest.importorskip("vllm_omni")
    import json

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = json.loads(command[command.index("'") + 1 : command.rindex("'")])
    own = {"modalities", "voice"}  # read by vLLM-Omni and by the plugin beside vLLM's own fields
    assert set(body) - own <= set(ChatCompletionRequest.model_fields)


@pytest.mark.parametrize(
    ("heading", "options"),
    [
        ("| option of `additional_config", Token2WavOptions),
        ("| option of MiMo-Audio's `additional_config", MiMoAudioOptions),
    ],
)
def test_options_in_the_readme_are_those_there_are(heading: str, options: type) -> None:
    import dataclasses

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index(heading) :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    documented = {name.strip("`"): default.strip("`") for name, default, _ in rows}
    assert documented == {field.name: str(field.default) for field in dataclasses.fields(options)}


def test_stage_configs_in_the_readme_are_those_there_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("### Stage configs") : readme.index("`vllm-omni-audio-perf configs` lists")]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(documented) == [name for name, _ in stage_configs_index.list_stage_configs()]
