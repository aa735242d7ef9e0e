# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf configs`: list the installed stage configs, or print the path of one."""

import argparse

from vllm_omni_audio_perf.stage_configs_index import list_stage_configs, stage_config_path


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `configs` subcommand."""
    parser = subparsers.add_parser(
        "configs",
        help="list the stage configs installed with the plugin, or print the path of one",
        description="List the stage configs installed with the plugin, or print the path of one.",
        epilog='Example: vllm-omni serve MODEL --omni --deploy-config "$(vllm-omni-audio-perf configs NAME)"',
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print only the absolute path of this stage config")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one path if a name was given, else one line for each stage config."""
    if args.name is not None:
        print(stage_config_path(args.name))
        return 0
    configs = list_stage_configs()
    width = max((len(name) for name, _ in configs), default=0)
    for name, description in configs:
        print(f"{name:{width}}  {description}".rstrip())
    return 0
