# SPDX-License-Identifier: Apache-2.0
"""One step of a code2wav stage: whose ids are whose, which of them are complete, and how its waveforms go out."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from vllm_omni_audio_perf.scheduling.request_errors import error_outputs

START_UP_RUN = "audio_perf_start_up_run"


def start_up_information(num_reqs: int) -> list[dict[str, bool]]:
    """What a stage answers to ``get_dummy_runtime_additional_information``.

    The engine passes it as ``runtime_additional_information`` in its start-up run, and only there. vLLM's second runner
    does not ask.
    """
    return [{START_UP_RUN: True} for _ in range(num_reqs)]


def is_start_up_run(information: object) -> bool:
    """Whether a step's ``runtime_additional_information`` is that of the engine's start-up run."""
    if not isinstance(information, list):
        return False
    return any(isinstance(request, Mapping) and START_UP_RUN in request for request in information)


def buffers_of_requests(information: object, requests: int) -> list[Mapping[str, Any]]:
    """A step's ``runtime_additional_information`` as one mapping for each request, empty where there is none."""
    given = information if isinstance(information, list) else []
    entries = [entry if isinstance(entry, Mapping) else {} for entry in given]
    return [*entries, *([{}] * requests)][:requests]


def ids_of_requests(input_ids: Tensor, seq_token_counts: Sequence[int] | None) -> list[list[int]]:
    """Split the ids of a step. Reads them back from the device, once.

    Args:
        input_ids: ``[tokens]``, those of all requests one after another, perhaps padded at the end.
        seq_token_counts: ids of each request; None for a single one.

    Raises:
        ValueError: where the requests have more ids than there are.
    """
    ids = input_ids.tolist()
    counts = [len(ids)] if seq_token_counts is None else seq_token_counts
    if sum(counts) > len(ids):
        raise ValueError(f"The requests of a step have {sum(counts)} codes, but there are {len(ids)} input ids.")
    starts = [0, *accumulate(counts)]
    return [ids[start : start + count] for start, count in zip(starts, counts, strict=False)]


def is_cut(ids: Sequence[int], buffer: Mapping[str, Any]) -> bool:
    """Whether more ids of a request follow in later steps.

    The engine cuts a request in two where a step's requests exceed ``max_num_batched_tokens``.
    """
    return buffer.get("_omni_num_computed_tokens", 0) + len(ids) < buffer.get("_omni_prompt_len", len(ids))


def is_last_part(buffer: Mapping[str, Any]) -> bool:
    """Whether earlier steps had ids of this request."""
    return buffer.get("_omni_num_computed_tokens", 0) > 0


def reason_of(failure: Exception) -> str:
    """What went wrong, in one line."""
    text = str(failure).splitlines()[0] if str(failure) else ""
    return text if isinstance(failure, ValueError) and text else f"{type(failure).__name__}: {text}"


def audio_output(waveforms: list[Tensor], errors: Sequence[str | None] = ()) -> Any:
    """The `OmniOutput` of a step.

    Args:
        waveforms: float32 ``[samples]``, one a request.
        errors: what the client of each request is to be told, or None.
    """
    from vllm_omni.model_executor.models.output_templates import OmniOutput

    return OmniOutput(text_hidden_states=None, multimodal_outputs={"model_outputs": waveforms} | error_outputs(errors))


def leave_inputs(input_ids: Tensor, input_embeds: Tensor, **info_dict: object) -> tuple[Tensor, Tensor, dict]:
    """A preprocess that changes nothing. A stage that has one learns a request's seed and how far it is."""
    return input_ids, input_embeds, {}
