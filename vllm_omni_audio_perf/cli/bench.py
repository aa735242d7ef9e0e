# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-audio-perf bench`: measure what the plugin gains, one nested subcommand a benchmark."""

import argparse
import importlib

# Modules of `vllm_omni_audio_perf.benchmarks`, in the order in which the help lists them. Each has the same
# `add_parser(subparsers)` as a subcommand.
_BENCHMARKS = ("token2wav", "token2wav_requests", "vocoder", "mimo_audio", "stage", "gpu")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `bench` subcommand with the benchmarks below it."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the time, the memory and the error of the plugin beside upstream's",
        description="Measure the time, the memory and the error of the plugin beside upstream's, on random weights.",
    )
    benchmarks = parser.add_subparsers(required=True, dest="benchmark", metavar="BENCHMARK")
    for name in _BENCHMARKS:
        importlib.import_module(f"vllm_omni_audio_perf.benchmarks.{name}").add_parser(benchmarks)
