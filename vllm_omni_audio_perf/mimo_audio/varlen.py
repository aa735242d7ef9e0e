# SPDX-License-Identifier: Apache-2.0
"""Attention of padded sequences through flash-attn, which takes the valid frames alone, one after another.

For decodes without a graph, for which frames it packs is read back. flash-attn is optional and imported only where it
is asked for.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_omni_audio_perf.mimo_audio.layers import Attend, valid_steps


class Attention(Protocol):
    """Prepares attention once for all layers that share lengths and window. `WindowedAttention` is one."""

    def __call__(
        self, lengths: Tensor, frames: int, *, window: tuple[int, int], causal: bool, dtype: torch.dtype
    ) -> Attend: ...


def load_flash_attention() -> Callable[..., Tensor]:
    """flash-attn's ``flash_attn_varlen_func``.

    Raises:
        ImportError: where it is not installed. The message says how to do without.
    """
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            "flash_attention is on, but flash-attn cannot be imported; install it, or leave flash_attention off."
        ) from error
    return flash_attn_varlen_func


class VarlenAttention:
    """An `Attention` through ``flash_attn_varlen_func``, which it is given."""

    def __init__(self, varlen_func: Callable[..., Tensor]) -> None:
        self._varlen_func = varlen_func

    def __call__(
        self, lengths: Tensor, frames: int, *, window: tuple[int, int], causal: bool, dtype: torch.dtype
    ) -> Attend:
        valid = valid_steps(lengths, frames).nonzero(as_tuple=True)  # read back once, for all layers
        offsets = pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        settings: dict[str, Any] = {"causal": causal, "window_size": window}

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if not len(valid[0]):
                return query
            packed = [
                tensor.transpose(1, 2)[valid] for tensor in (query, key, value)
            ]  # [valid frames, heads, head_dim]
            out = query.new_zeros(query.transpose(1, 2).shape)
            out[valid] = self._varlen_func(*packed, offsets, offsets, frames, frames, **settings)
            return out.transpose(1, 2)

        return attend
