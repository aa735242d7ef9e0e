# SPDX-License-Identifier: Apache-2.0
"""The frame of the command line: spelling of options, exit codes, and how errors are shown."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from vllm_omni_audio_perf import __version__, cli

COMMAND = [sys.executable, "-m", "vllm_omni_audio_perf.cli"]


@pytest.fixture
def run_instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Replaces what `main` runs, behind a parser with options like those of a real subcommand."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        parser = argparse.ArgumentParser(prog="vllm-omni-audio-perf")
        parser.add_argument("rest", nargs="*")
        parser.add_argument("--output-dir")
        parser.add_argument("--dry-run", action="store_true")
        parser.set_defaults(run=run)
        monkeypatch.setattr(cli, "_build_parser", lambda: parser)

    return install


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--output-dir", "a_b", "--dry-run"], ("a_b", True, [])),
        (["--output_dir", "a_b", "--dry_run"], ("a_b", True, [])),
        (["--output_dir=a_b=c_d"], ("a_b=c_d", False, [])),
        (["a_b", "--", "--output_dir"], (None, False, ["a_b", "--output_dir"])),
    ],
)
def test_option_names_take_underscores_and_values_keep_theirs(
    run_instead: Callable[..., None], argv: list[str], expected: tuple[str | None, bool, list[str]]
) -> None:
    seen: list[argparse.Namespace] = []
    run_instead(lambda args: seen.append(args) or 0)

    assert cli.main(argv) == 0
    assert (seen[0].output_dir, seen[0].dry_run, seen[0].rest) == expected


def test_the_exit_code_is_the_subcommands(run_instead: Callable[..., None]) -> None:
    run_instead(lambda args: 7)

    assert cli.main([]) == 7


@pytest.mark.parametrize(
    "error",
    [
        ValueError("speaker 'Eve' is unknown"),
        FileNotFoundError(2, "No such file or directory", "x.yaml"),
        FileExistsError(17, "File exists", "out"),
        PermissionError(13, "Permission denied", "out"),
    ],
)
def test_refused_input_is_one_line_and_exit_code_2(
    run_instead: Callable[..., None], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def refuse(args: argparse.Namespace) -> int:
        raise error

    run_instead(refuse)

    assert cli.main([]) == 2
    assert capsys.readouterr() == ("", f"vllm-omni-audio-perf: error: {error}\n")


def test_a_fault_of_the_program_keeps_its_traceback(run_instead: Callable[..., None]) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise RuntimeError("a fault")

    run_instead(fail)

    with pytest.raises(RuntimeError, match="a fault"):
        cli.main([])


def test_ctrl_c_is_exit_code_130_without_a_traceback(
    run_instead: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: argparse.Namespace) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    run_instead(interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    try:
        assert cli.main([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("argument", "exit_codes"), [("configs", {141}), ("--help", {141, 0})])
def test_a_reader_that_goes_away_is_no_error_message(argument: str, exit_codes: set[int]) -> None:
    # argparse itself swallows the error where it meets it, which is where stdout is not buffered.
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    try:
        result = subprocess.run([*COMMAND, argument], stdout=writing_end, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing_end)

    assert result.stderr == ""
    assert result.returncode in exit_codes


def test_version() -> None:
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)

    assert result.stdout == f"vllm-omni-audio-perf {__version__}\n"


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])

    assert exit_info.value.code == 0
    words = capsys.readouterr().out.replace("-", "_").split()
    assert set(cli._SUBCOMMANDS) <= set(words)


@pytest.mark.parametrize("argv", [[], ["no_such_command"], ["configs", "--no-such-option"]])
def test_arguments_that_do_not_parse_are_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)

    assert exit_info.value.code == 2
    assert "usage: vllm-omni-audio-perf" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["configs"]])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from vllm_omni_audio_perf.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'vllm', 'vllm_omni', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )

    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
