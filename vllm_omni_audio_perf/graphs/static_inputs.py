# SPDX-License-Identifier: Apache-2.0
"""The tensors that a captured graph reads its inputs from."""

from collections.abc import Sequence

import torch
from torch import Tensor


class StaticInputs:
    """Buffers of one bucket, each with the values that stand where an input does not reach.

    Args:
        padding: one tensor an input, any shape and dtype, holding the padding values. Kept, never written to: it may be
            expanded from a single value.
    """

    def __init__(self, padding: Sequence[Tensor]) -> None:
        self._padding = tuple(padding)
        # An inference tensor could not be written to outside inference mode, where a later call may run.
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in self._padding)
        """What the captured function reads, in the order of its arguments."""

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Refuse what :meth:`fill` would silently convert, broadcast or fail on.

        Raises:
            ValueError: for another number of inputs than there are buffers, or an input of another dtype, device or
                rank than its buffer, or larger than it.
        """
        if len(inputs) != len(self.tensors):
            raise ValueError(f"Expected {len(self.tensors)} inputs, got {len(inputs)}.")
        for index, (given, static) in enumerate(zip(inputs, self.tensors, strict=True)):
            if given.dtype != static.dtype or given.device != static.device:
                raise ValueError(
                    f"Input {index} must be {static.dtype} on {static.device}, got {given.dtype} on {given.device}."
                )
            if given.ndim != static.ndim or any(
                size > room for size, room in zip(given.shape, static.shape, strict=True)
            ):
                raise ValueError(
                    f"Input {index} of shape {tuple(given.shape)} does not fit its buffer of {tuple(static.shape)}."
                )

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """Copy inputs to the start of their buffers, and the padding values to the rest.

        Args:
            inputs: as :meth:`check` accepts them.
        """
        for given, static, padding in zip(inputs, self.tensors, self._padding, strict=True):
            if given.shape != static.shape:
                static.copy_(padding)
            static[tuple(slice(size) for size in given.shape)].copy_(given)
