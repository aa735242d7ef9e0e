# SPDX-License-Identifier: Apache-2.0
"""Everything that patches vLLM or vLLM-Omni or depends on their exact version. Nothing else in the package does.

Each patch says why it is needed and for which version it was written.
"""

import torch

TESTED_VLLM_OMNI = "0.30.0"


def answer_capture_query_without_cuda() -> None:
    """Make ``torch.cuda.is_current_stream_capturing`` answer False on a machine without CUDA.

    A CUDA build of torch on a machine without a driver raises there, and stock MiMo-Audio asks on every forward
    (vLLM-Omni 0.30.0). Nothing can be capturing where there is no CUDA, so False is the true answer. Does nothing
    where CUDA is available; may be called repeatedly.
    """
    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = _never_capturing


def _never_capturing() -> bool:
    return False
