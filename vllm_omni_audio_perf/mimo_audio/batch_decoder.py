# SPDX-License-Identifier: Apache-2.0
"""Decodes the requests of a step: in as few decodes as is cheap, in captured graphs where there are any."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_omni_audio_perf.graphs import Buckets, GraphRunner
from vllm_omni_audio_perf.mimo_audio.batching import Shape, plan_batches
from vllm_omni_audio_perf.mimo_audio.decoder import FixedShapeDecoder

MAX_EAGER_CODES = 8192
"""Most codes, padding included, of several requests in one decode without a graph: bounds its memory."""


EAGER_COST = 512
"""What a decode costs more without a graph where there are graphs, in codes: launching its kernels one by one. An
estimate, not measured on a GPU."""


class BatchDecoder:
    """`FixedShapeDecoder` for requests of any number and length.

    Args:
        decoder: decodes on its own device.
        runner: made by `graph_runner`; None to decode without graphs.
    """

    def __init__(self, decoder: FixedShapeDecoder, runner: GraphRunner | None = None) -> None:
        self.decoder = decoder
        self.runner = runner
        self._bucket_for: Callable[[Shape], Any] = runner.bucket_for if runner is not None else lambda shape: None

    @torch.inference_mode()
    def decode(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """Decode each request as if it were alone.

        Args:
            codes: int64 ``[rows, codes]`` each, on the CPU, of valid codes; no codes give no samples.

        Returns:
            float32 ``[samples]`` each, on the CPU, in order.
        """
        waveforms = [torch.zeros(0)] * len(codes)
        by_rows: dict[int, list[int]] = {}
        for index, request in enumerate(codes):
            if request.shape[1]:
                by_rows.setdefault(request.shape[0], []).append(index)
        for rows, indices in by_rows.items():
            lengths = [codes[index].shape[1] for index in indices]
            for batch in plan_batches(lengths, partial(self._cost, rows)):
                chosen = [indices[position] for position in batch]
                for index, waveform in zip(chosen, self._decode_batch([codes[index] for index in chosen]), strict=True):
                    waveforms[index] = waveform
        return waveforms

    def _decode_batch(self, codes: list[Tensor]) -> list[Tensor]:
        lengths = [request.shape[1] for request in codes]
        rows, longest = codes[0].shape[0], max(lengths)
        padded = torch.zeros(len(codes), rows, longest, dtype=torch.long)
        for request, row in zip(codes, padded, strict=True):
            row[:, : request.shape[1]] = request
        device = self.decoder.device
        inputs = (padded.to(device), torch.tensor(lengths, device=device))
        if self.runner is None:
            samples, _ = self.decoder.decode_varlen(*inputs)
        else:
            samples, _ = self.runner((len(codes), longest, rows), *inputs)
        samples = samples.cpu()
        return [
            row[: length * self.decoder.samples_per_code].clone() for row, length in zip(samples, lengths, strict=True)
        ]

    def _cost(self, rows: int, size: int, longest: int) -> int:
        """What a decode computes, in codes."""
        bucket = self._bucket_for((size, longest, rows))
        if bucket is not None:
            return bucket[0] * bucket[1]
        too_large = size > 1 and size * longest > MAX_EAGER_CODES
        return size * longest * (1000 if too_large else 1) + (EAGER_COST if self.runner is not None else 0)


def graph_runner(decoder: FixedShapeDecoder, shapes: Sequence[Shape], **arguments: Any) -> GraphRunner:
    """A runner that captures a decode of each of `shapes`.

    Args:
        decoder: what is captured.
        shapes: requests, codes and rows of each bucket.
        arguments: of `GraphRunner`: ``backend`` and ``budget``.
    """
    device = decoder.device

    def make_inputs(bucket: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        size, longest, rows = bucket
        codes = torch.zeros(size, rows, longest, dtype=torch.long, device=device)
        return codes, torch.zeros(size, dtype=torch.long, device=device)  # rows without a request have no codes

    def trim(outputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        waveforms, sample_counts = outputs
        return waveforms[: shape[0], : shape[1] * decoder.samples_per_code], sample_counts[: shape[0]]

    return GraphRunner(
        "MiMo-Audio decoder",
        decoder.decode_fixed,
        make_inputs,
        trim,
        buckets=Buckets(shapes, exact_dims=(2,)),
        device=device,
        eager=decoder.decode_varlen,
        **arguments,
    )
