# SPDX-License-Identifier: Apache-2.0
"""Everything that reaches into vLLM, vLLM-Omni or torch beyond their registries. Nothing else in the package does.

Each function says why it is needed and for which version it was written. All of them may be called repeatedly.
"""

import logging
import os


def log_through_vllm(package: str) -> None:
    """Give a package's log lines vLLM's handlers and level, as vLLM-Omni 0.30.0 does with its own."""
    logging.getLogger(package).parent = logging.getLogger("vllm")


def check_configuration(architecture: str, check: str) -> None:
    """Have vLLM run a check of ours on the configuration of each stage of one of our architectures.

    vLLM 0.30.0 has the hook (``VerifyAndUpdateConfig``) but a table without a function to register in.

    Args:
        architecture: one of ours.
        check: "module:Class" of a ``VerifyAndUpdateConfig``.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.utils.import_utils import resolve_obj_by_qualname

    MODELS_CONFIG_MAP[architecture] = resolve_obj_by_qualname(check.replace(":", "."))


def prefer_one_process_a_stage() -> None:
    """Run a stage's engine core and worker in one process, unless the user's environment says otherwise.

    Each process imports vLLM and torch again, which takes most of the start-up time and of a small model's memory. vLLM
    0.30.0 reads the variable when it puts a stage's configuration together in the main process, too early for the
    ``env:`` of a stage config.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def answer_capture_query_without_cuda() -> None:
    """Make ``torch.cuda.is_current_stream_capturing`` answer False on a machine without CUDA.

    A CUDA build of torch on a machine without a driver raises there, and stock MiMo-Audio asks on every forward
    (vLLM-Omni 0.30.0). Nothing can be capturing where there is no CUDA, so False is the true answer. Does nothing where
    CUDA is available.
    """
    import torch

    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = _never_capturing


def _never_capturing() -> bool:
    return False
