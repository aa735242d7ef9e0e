# SPDX-License-Identifier: Apache-2.0
"""The talker's ids: which of them are codes, which are marks, and which no codebook has."""

from collections.abc import Sequence

PLACEHOLDER = -1
"""What vLLM leaves where asynchronous scheduling has not filled in a sampled id."""

FIRST_MARK, LAST_MARK = 8292, 8296
"""Pad, begin, end and mask of the talker, hard-coded in vLLM-Omni's ``qwen2_5_omni.py`` and its input processor."""


class CodesError(ValueError):
    """An id is in no codebook. The message names it, its position and the allowed range."""


def clean_codes(ids: Sequence[int], codebook_size: int) -> list[int]:
    """Keep the codes of a request.

    vLLM-Omni's input processor drops marks and placeholders on the way from the talker; what is left of them here is
    dropped by the same rule, so that calling this on what it sends changes nothing.

    Args:
        ids: what the talker produced for one request.
        codebook_size: codes are ``0 .. codebook_size - 1``.

    Raises:
        CodesError: for an id that is neither a code nor a mark nor a placeholder.
    """
    codes = []
    for position, id_ in enumerate(ids):
        if 0 <= id_ < codebook_size:
            codes.append(id_)
        elif id_ != PLACEHOLDER and not FIRST_MARK <= id_ <= LAST_MARK:
            raise CodesError(
                f"code {id_} at position {position} of {len(ids)} is not in the codebook; "
                f"allowed: 0 to {codebook_size - 1}."
            )
    return codes
