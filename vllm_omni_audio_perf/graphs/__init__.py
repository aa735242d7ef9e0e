# SPDX-License-Identifier: Apache-2.0
"""Capture and replay of a function of fixed-shape tensors. Pure torch: nothing here imports vLLM or vLLM-Omni."""

from vllm_omni_audio_perf.graphs.backend import CaptureFailed, Graph, GraphBackend, GraphPool
from vllm_omni_audio_perf.graphs.buckets import Bucket, Buckets
from vllm_omni_audio_perf.graphs.cuda import CudaGraphBackend
from vllm_omni_audio_perf.graphs.runner import CaptureBudget, GraphRunner
from vllm_omni_audio_perf.graphs.static_inputs import StaticInputs
from vllm_omni_audio_perf.graphs.statistics import Fallback, GraphStatistics

__all__ = [
    "Bucket",
    "Buckets",
    "CaptureBudget",
    "CaptureFailed",
    "CudaGraphBackend",
    "Fallback",
    "Graph",
    "GraphBackend",
    "GraphPool",
    "GraphRunner",
    "GraphStatistics",
    "StaticInputs",
]
