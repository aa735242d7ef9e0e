# SPDX-License-Identifier: Apache-2.0
"""Checks, without a GPU, that a computation does nothing that a CUDA graph capture forbids or would freeze.

A twin of the module and the inputs, of fake tensors on a CUDA device that need not exist, is run once under torch's
``FakeTensorMode``, which computes shapes and devices and no values. That mode alone lets copies between host and device
and random numbers pass, so another one above it looks at each operator first. What is found:

- values read back to the host (``item``, ``tolist``, ``bool``, ``cpu``);
- copies from the host (``torch.tensor([...], device="cuda")``, an element set to a number);
- shapes that depend on values (``nonzero``, boolean indexing, ``repeat_interleave`` without ``output_size``), including
  assignment through a boolean index, which has a fixed shape but looks for the indices first;
- operands left on the host, among them plain tensor attributes of modules, which ``Module.to`` does not move;
- random numbers; outputs on the host; nothing computed at all.

What it cannot see: synchronisation that is no operator of torch (``torch.cuda.synchronize``), and what a kernel does
inside.
"""

import copy
import functools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TORCH = str(Path(torch.__file__).parent)
_NOT_OURS = (_TORCH, __file__)

_COPIES = {"_to_copy", "copy_", "copy"}
_INDEX_PUTS = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_PROBABILITIES = ("dropout_p", "dropout", "p")


class CaptureUnsafe(AssertionError):
    """Something cannot run in a capture. The message lists each finding: kind, operator and source line."""


@dataclass(frozen=True)
class Violation:
    """One finding."""

    kind: str
    operator: str
    """Torch's name of it, or the error that ended the run."""
    line: str
    """File, number and text of the innermost line that is not torch's."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.operator} at {self.line}"


def assert_capture_safe(target: Any, inputs: Sequence[Any] = (), *, method: str | None = None) -> Any:
    """Fail where a call would not survive a capture, or not mean the same at a replay.

    Neither the target nor the inputs are touched, but functions that cache what they return will cache fake tensors.

    Args:
        target: what is called: a module, a function, a bound method, or with `method` any object. A function must get
            its modules and tensors as inputs, not from a closure.
        inputs: positional arguments. All their tensors are taken to be on the device, on whatever device they are.
        method: the name of the method of `target` to call.

    Returns:
        What the call returned, with fake tensors: shapes, dtypes and devices are right.

    Raises:
        CaptureUnsafe: for anything that `find_violations` finds.
        RuntimeError: as `find_violations`.
    """
    violations, result, error = _check(target, inputs, method)
    if violations:
        raise CaptureUnsafe("\n".join(map(str, violations))) from error
    return result


def find_violations(target: Any, inputs: Sequence[Any] = (), *, method: str | None = None) -> list[Violation]:
    """What `assert_capture_safe` would fail on, in the order it happens; the run ends at what it cannot go beyond.

    Args:
        target: as for `assert_capture_safe`.
        inputs: as for `assert_capture_safe`.
        method: as for `assert_capture_safe`.

    Raises:
        RuntimeError: if torch was built without CUDA, and so has no CUDA tensors, even fake ones.
    """
    return _check(target, inputs, method)[0]


def _check(target: Any, inputs: Sequence[Any], method: str | None) -> tuple[list[Violation], Any, Exception | None]:
    if not torch.backends.cuda.is_built():
        raise RuntimeError(
            f"Checking for capture safety needs a torch that is built with CUDA, not {torch.__version__}. "
            "It needs no GPU and no driver."
        )
    fake_mode = FakeTensorMode()
    twin, arguments = _fake_twin(fake_mode, (target, tuple(inputs)))
    checker = _Checker()
    result: Any = None
    error: Exception | None = None
    # cuDNN's recurrent layers have no fake implementation.
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False), fake_mode, checker:
        try:
            result = (getattr(twin, method) if method else twin)(*arguments)
        except Exception as exception:
            error = exception
    violations = checker.violations
    if error is not None and not checker.explained:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        violations.append(Violation("the call failed", reason, _line(traceback.extract_tb(error.__traceback__))))
    for output in tree_leaves(result):
        if isinstance(output, Tensor) and output.device.type != "cuda":
            violations.append(Violation("output on the host", f"a tensor of shape {tuple(output.shape)}", "the return"))
    if not violations and not checker.operators:
        violations.append(Violation("no operator seen", "nothing was computed with tensors", "the call"))
    return violations, result, error


class _Checker(TorchDispatchMode):
    """Sees every operator before `FakeTensorMode` does, with the devices of its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[Violation] = []
        self.operators = 0
        self.explained = False
        """Whether the operator that ended the run is among the violations."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operators += 1
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        on_device = any(operand.device.type == "cuda" for operand in operands)
        name = func._schema.name.partition("::")[2]
        noted_before = len(self.violations)
        # `lift_fresh` is how torch passes in a tensor that `torch.tensor` has just made.
        if name != "lift_fresh" and any(not isinstance(operand, FakeTensor) for operand in operands):
            self._note("tensor that is no input and not part of the module", func)
        elif on_device and name not in _COPIES:
            self._check_operands(func, operands)
        if on_device and name in _INDEX_PUTS and _looks_for_indices(arguments["indices"], arguments["values"]):
            self._note("assignment through a boolean index", func)
        if torch.Tag.nondeterministic_seeded in func.tags and _is_random(func, arguments):
            self._note("random numbers", func)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if isinstance(error, DataDependentOutputException):
                self._note("read back to the host", func)
            elif isinstance(error, DynamicOutputShapeException):
                self._note("shape that depends on values", func)
            self.explained = len(self.violations) > noted_before
            raise
        if name in _COPIES:
            self._check_copy(func, operands[-1], result)
        return result

    def _check_copy(self, func: Any, source: Tensor, result: Tensor) -> None:
        if (source.device.type, result.device.type) == ("cuda", "cpu"):
            self._note("read back to the host", func)
        elif (source.device.type, result.device.type) == ("cpu", "cuda"):
            self._note("copy from the host", func)

    def _check_operands(self, func: Any, operands: Sequence[Tensor]) -> None:
        # A single value on the host is handed to the kernel like a Python number: no copy, only frozen, and harmless
        # where it is a constant of the code.
        if any(operand.device.type == "cpu" and (operand.ndim or _was_given(operand)) for operand in operands):
            self._note("operand on the host", func)

    def _note(self, kind: str, func: Any) -> None:
        self.violations.append(Violation(kind, str(func), _line(traceback.extract_stack())))


def _looks_for_indices(indices: Sequence[Tensor | None], values: Tensor) -> bool:
    """Whether an assignment needs the indices where a mask is set. With a single value on the host it does not."""
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return masked and not (values.numel() == 1 and values.device.type == "cpu")


def _is_random(func: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether an operator that may draw random numbers does, that is, unless it is a dropout of nothing."""
    names = [argument.name for argument in func._schema.arguments]
    probability = next((name for name in _PROBABILITIES if name in names), None)
    if probability is None:
        return True
    if arguments.get("train") is False:
        return False
    return bool(arguments.get(probability, 0.0))


def _line(frames: traceback.StackSummary) -> str:
    ours = [frame for frame in frames if not frame.filename.startswith(_NOT_OURS)]
    frame = ours[-1] if ours else frames[-1]
    return f"{frame.filename}:{frame.lineno} `{(frame.line or '').strip()}`"


_GIVEN = "_audio_perf_given"


def _was_given(tensor: Tensor) -> bool:
    return getattr(tensor, _GIVEN, False)


def _fake_twin(mode: FakeTensorMode, original: Any) -> Any:
    """A deep copy with a fake tensor for each tensor: on CUDA, as after ``Module.to("cuda")`` and inputs to match."""
    memo: dict[int, Any] = {}
    for tensor, moves in _tensors(original, True, set()):
        previous = memo.get(id(tensor))
        if previous is None or (moves and previous.device.type == "cpu"):
            memo[id(tensor)] = _fake(mode, tensor, "cuda" if moves else "cpu")
    return copy.deepcopy(original, memo)


def _fake(mode: FakeTensorMode, tensor: Tensor, device: str) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    setattr(fake, _GIVEN, True)
    return fake


def _tensors(value: Any, moves: bool, seen: set[int]) -> Iterator[tuple[Tensor, bool]]:
    """Every tensor that a deep copy reaches, and whether ``Module.to`` or the caller moves it to the device."""
    if isinstance(value, Tensor):
        yield value, moves
        return
    if id(value) in seen or isinstance(value, type | ModuleType | FunctionType | BuiltinFunctionType | str | bytes):
        return
    seen.add(id(value))
    children: list[tuple[Any, bool]] = []
    if isinstance(value, MethodType):
        children = [(value.__self__, moves)]
    elif isinstance(value, Mapping):
        children = [(child, moves) for child in value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        children = [(child, moves) for child in value]
    elif isinstance(value, functools.partial):
        children = [(child, moves) for child in (value.func, value.args, value.keywords)]
    elif isinstance(value, nn.Module):
        registered = ("_parameters", "_buffers", "_modules")
        children = [(vars(value)[name], True) for name in registered]
        children += [(child, False) for name, child in vars(value).items() if name not in registered]
    elif hasattr(value, "__dict__"):
        children = [(child, moves) for child in vars(value).values()]
    for child, child_moves in children:
        yield from _tensors(child, child_moves, seen)
