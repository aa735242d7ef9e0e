# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni-audio-perf bench` measures: `harness` for all of it, and one module a benchmark.

A benchmark runs without vLLM and vLLM-Omni. Its module imports nothing heavy at its top: all are imported for `--help`.
"""
