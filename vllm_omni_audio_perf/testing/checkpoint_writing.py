# SPDX-License-Identifier: Apache-2.0
"""What the generators of random checkpoints share: reproducible numbers, and folders that are never half written."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

__all__ = ["MARKER_FILE", "normal", "replaced_folder", "save_weights", "write_json"]

# Says that a generator made the folder, and with which arguments; the real repositories have no such file.
MARKER_FILE = "random_checkpoint.json"


def normal(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return standard normal numbers, float32, that depend on nothing but the arguments.

    Each tensor has its own generator, so that none depends on which others there are, or on their order.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder to fill, which then takes the target's place; an error leaves the target as it was.

    Args:
        target: may exist if it is empty, or if it is an earlier random checkpoint, which is replaced. At no time is it
            an incomplete one.

    Raises:
        FileExistsError: `target` is a file, or a folder with other contents.
    """
    _check_replaceable(target)
    resolved = target.resolve()  # replaces what a link points to, not the link
    resolved.parent.mkdir(parents=True, exist_ok=True)
    partial = resolved.with_name(f".{resolved.name}.partial-{os.getpid()}")  # a sibling can be renamed into place
    partial.mkdir()
    try:
        yield partial
        _replace(resolved, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_weights(directory: Path, weights: Mapping[str, torch.Tensor], *, largest_shard: float = 1.0) -> None:
    """Write safetensors files, and their index if there are several.

    Args:
        directory: an existing folder.
        weights: name to tensor.
        largest_shard: the largest file's share of the whole, as far as no single tensor is larger.
    """
    size = sum(weight.nbytes for weight in weights.values())
    split = split_torch_state_dict_into_shards(dict(weights), max_shard_size=math.ceil(size * largest_shard))
    for filename, names in split.filename_to_tensors.items():
        path = directory / filename
        path.touch()
        mode = path.stat().st_mode
        save_file({name: weights[name] for name in names}, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors makes its files readable by their owner only
    if split.is_sharded:
        index = {"metadata": {"total_size": size}, "weight_map": split.tensor_to_filename}
        write_json(directory / "model.safetensors.index.json", index)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, indented and with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} exists and is not a folder")
    if any(target.iterdir()) and not (target / MARKER_FILE).is_file():
        raise FileExistsError(f"{target} holds other files and no random checkpoint (no {MARKER_FILE}): not replaced")


def _replace(target: Path, partial: Path) -> None:
    """Put the finished folder in the target's place; at no time is the target an incomplete checkpoint."""
    if target.exists():
        replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
