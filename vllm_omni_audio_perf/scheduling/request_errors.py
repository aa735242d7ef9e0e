# SPDX-License-Identifier: Apache-2.0
"""How a stage tells the scheduler which requests of a step failed, and why.

vLLM-Omni 0.30.0 has no channel for that from a generation stage: an exception in ``forward`` ends the stage. Its
outputs are tensors, one a request, so an error travels as one more output of UTF-8 bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ERROR_OUTPUT = "audio_perf_error"
"""Name of the output; absent from steps without a failure."""


def error_outputs(errors: Sequence[str | None]) -> dict[str, list[Tensor]]:
    """The output that stands beside the waveforms of a step.

    Args:
        errors: one entry a request, in order: the reason, or None where it succeeded.

    Returns:
        Empty where nothing failed.
    """
    if not any(errors):
        return {}
    return {ERROR_OUTPUT: [torch.tensor(list((error or "").encode()), dtype=torch.uint8) for error in errors]}


def take_error(output: object) -> str | None:
    """Remove the error from one request's outputs.

    Args:
        output: the dictionary of one request, changed in place; anything else has no error.

    Returns:
        The reason, or None where the request succeeded.
    """
    if not isinstance(output, dict) or ERROR_OUTPUT not in output:
        return None
    return bytes(output.pop(ERROR_OUTPUT).tolist()).decode() or None
