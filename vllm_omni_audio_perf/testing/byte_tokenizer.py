# SPDX-License-Identifier: Apache-2.0
"""A Qwen2 tokenizer without merges: one token for each byte, and the real ids for everything with a special meaning.

Random models have nothing to gain from a learned vocabulary, but vLLM-Omni hard-codes special ids near 151 643, and a
reply has to decode to readable text. Ids 0..255 are the byte alphabet in the order of the real Qwen2 vocabulary ("!" is
0, "~" is 93, the space 220); ids from 256 up to the first added token are fillers, because `tokenizers` prints a
warning for every hole in a vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

__all__ = ["PRINTABLE_IDS", "byte_id", "save_byte_tokenizer"]

_NUM_BYTES = 256

# The alphabet stands for the bytes that are not printable with characters from U+0100 on, in the bytes' order:
# sorting by code point gives the order of the GPT-2 and Qwen2 vocabularies.
_BYTE_ALPHABET = sorted(ByteLevel.alphabet())

_FIRST_STANDIN = 0x100
_UNPRINTABLE_BYTES = [byte for byte in range(_NUM_BYTES) if chr(byte) not in _BYTE_ALPHABET]


def byte_id(byte: int) -> int:
    """Return the token id (0..255) of a byte (0..255)."""
    standin = chr(byte) if chr(byte) in _BYTE_ALPHABET else chr(_FIRST_STANDIN + _UNPRINTABLE_BYTES.index(byte))
    return _BYTE_ALPHABET.index(standin)


# Token ids of the printable ASCII characters, space included, in the characters' order.
PRINTABLE_IDS: tuple[int, ...] = tuple(byte_id(byte) for byte in range(ord(" "), ord("~") + 1))


def save_byte_tokenizer(
    directory: Path,
    *,
    special_tokens: Mapping[str, int],
    plain_tokens: Mapping[str, int],
    eos_token: str,
    pad_token: str,
    named_tokens: Mapping[str, str],
    chat_template: str,
    model_max_length: int = 32768,
) -> None:
    """Write a byte-level tokenizer in the file layout of the Qwen2 family.

    Writes tokenizer.json, tokenizer_config.json, vocab.json, merges.txt, added_tokens.json, special_tokens_map.json and
    chat_template.jinja.

    Args:
        directory: an existing folder.
        special_tokens: text and id of the added tokens that `skip_special_tokens=True` drops.
        plain_tokens: text and id of the added tokens that it keeps. Together with `special_tokens` their ids are
            consecutive.
        eos_token: text of the token that ends a reply, one of `special_tokens`.
        pad_token: text of the padding token, one of `special_tokens`.
        named_tokens: attribute name to text of the tokens that the model's processor asks the tokenizer for, such as
            `{"audio_token": "<|AUDIO|>"}`.
        chat_template: Jinja source.
        model_max_length: longest input in tokens.

    Raises:
        ValueError: the added ids are not consecutive, or one lies in the byte range.
    """
    added_ids = {**special_tokens, **plain_tokens}
    first_added = min(added_ids.values())
    if sorted(added_ids.values()) != list(range(first_added, first_added + len(added_ids))):
        raise ValueError(f"the ids of the added tokens must be consecutive, got {sorted(added_ids.values())}")
    if first_added < _NUM_BYTES:
        raise ValueError(f"ids below {_NUM_BYTES} are the byte alphabet, got an added token with id {first_added}")

    vocabulary = {character: index for index, character in enumerate(_BYTE_ALPHABET)}
    vocabulary |= {f"<{index}>": index for index in range(_NUM_BYTES, first_added)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        # Added first and in the order of their ids: an id is given by position.
        added_tokens_decoder={
            index: AddedToken(text, special=text in special_tokens, normalized=False)
            for text, index in sorted(added_ids.items(), key=lambda item: item[1])
        },
        unk_token=None,
        eos_token=eos_token,
        pad_token=pad_token,
        extra_special_tokens=dict(named_tokens),
        model_max_length=model_max_length,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)

    # transformers 5 needs only the two files it writes; older readers look for these.
    _write_json(directory / "vocab.json", vocabulary)
    (directory / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    _write_json(directory / "added_tokens.json", added_ids)
    _write_json(directory / "special_tokens_map.json", {"eos_token": eos_token, "pad_token": pad_token, **named_tokens})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
