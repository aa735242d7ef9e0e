# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni-audio-perf` command.

Each subcommand is a module of this package with `add_parser(subparsers)`, which adds its parser and sets
`run(args) -> int` as that parser's default. Options are declared with dashes (`--output-dir`). Modules import nothing
heavy at their top: all of them are imported even for `--help`.
"""

import argparse
import importlib
import os
import signal
import sys

from vllm_omni_audio_perf import __version__

__all__ = ["main"]

# Modules of this package, in the order in which the help lists them.
_SUBCOMMANDS = ("configs", "make_checkpoint", "bench")

_EXIT_USER_ERROR = 2  # what argparse exits with, too


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit code: what the subcommand returned, 2 for an input it refused (the reason is one message on stderr),
        130 after Ctrl-C, 141 when the reader of stdout went away.

    Raises:
        SystemExit: from argparse, after `--help` or `--version` (0) or for arguments it rejects (2).
    """
    parser = _build_parser()
    try:
        try:
            args = parser.parse_args(_with_dashes(sys.argv[1:] if argv is None else argv))
            return args.run(args)
        finally:
            sys.stdout.flush()  # A closed pipe has to show here, not at interpreter exit, where nothing can catch it.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # The flush at exit must not fail again.
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return _EXIT_USER_ERROR


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-omni-audio-perf",
        description="Helpers for the vllm-omni-audio-perf plugin of vLLM-Omni.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for name in _SUBCOMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser


def _with_dashes(argv: list[str]) -> list[str]:
    """Spell option names with dashes, so that `--foo_bar[=x]` works like `--foo-bar[=x]`.

    vLLM's FlexibleArgumentParser does the same, but importing it takes many seconds.
    """
    result: list[str] = []
    for index, argument in enumerate(argv):
        if argument == "--":  # what follows are no options
            return result + argv[index:]
        if argument.startswith("--"):
            option, equals, value = argument.partition("=")
            argument = option.replace("_", "-") + equals + value
        result.append(argument)
    return result
