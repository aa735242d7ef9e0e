# SPDX-License-Identifier: Apache-2.0
"""The scheduler ends the requests that failed, and only those."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

from vllm.v1.request import RequestStatus
from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

from vllm_omni_audio_perf.scheduling.request_errors import error_outputs
from vllm_omni_audio_perf.scheduling.scheduler import AudioPerfGenerationScheduler


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> AudioPerfGenerationScheduler:
    """One whose upstream part asks for each request's pooling output, and nothing else."""

    def ask(self: Any, scheduled: Any, output: Any) -> dict:
        return {request.request_id: self._maybe_decode_pooling_output(request, None) for request in scheduled}

    monkeypatch.setattr(OmniGenerationScheduler, "update_from_output", ask)
    scheduler = AudioPerfGenerationScheduler.__new__(AudioPerfGenerationScheduler)
    scheduler._pooling_output_decoder = None
    return scheduler


def running(request_id: str) -> Any:
    return SimpleNamespace(request_id=request_id, status=RequestStatus.RUNNING, stop_reason=None, resumable=True)


def step(errors: list[str | None]) -> Any:
    """The runner's output of a step of requests "0", "1", ..."""
    entries = error_outputs(errors)
    outputs = [
        {"model_outputs": torch.zeros(4)} | {name: values[index] for name, values in entries.items()}
        for index in range(len(errors))
    ]
    return SimpleNamespace(multimodal_outputs=outputs, req_id_to_index={str(i): i for i in range(len(errors))})


def test_only_the_failed_request_ends_with_an_error(scheduler: AudioPerfGenerationScheduler) -> None:
    requests = [running("0"), running("1"), running("2")]
    output = step([None, "out of range", None])
    scheduler.update_from_output(requests, output)
    statuses = [request.status for request in requests]
    assert statuses == [RequestStatus.RUNNING, RequestStatus.FINISHED_ERROR, RequestStatus.RUNNING]
    assert [request.stop_reason for request in requests] == [None, "out of range", None]
    assert all(list(entry) == ["model_outputs"] for entry in output.multimodal_outputs)


def test_a_failure_is_forgotten_with_its_step(scheduler: AudioPerfGenerationScheduler) -> None:
    scheduler.update_from_output([running("0")], step(["out of range"]))
    request = running("0")
    scheduler.update_from_output([request], step([None]))
    assert request.status == RequestStatus.RUNNING


def test_a_step_without_outputs(scheduler: AudioPerfGenerationScheduler) -> None:
    empty = SimpleNamespace(multimodal_outputs=None, req_id_to_index={"0": 0})
    assert scheduler.update_from_output([running("0")], empty) == {"0": None}


def test_keeps_of_the_sampling_parameters_what_such_a_stage_reads(
    scheduler: AudioPerfGenerationScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id that the vocabulary has not would end the stage, and upstream does not check it."""
    from vllm import SamplingParams

    added: list[Any] = []
    monkeypatch.setattr(OmniGenerationScheduler, "add_request", lambda self, request: added.append(request))
    given = SamplingParams(
        allowed_token_ids=[999_999_999], logit_bias={5: 1.0}, seed=7, max_tokens=3, extra_args={"a": 1}
    )
    for request in (SimpleNamespace(sampling_params=given), SimpleNamespace(sampling_params=None)):
        scheduler.add_request(request)
    kept = added[0].sampling_params
    assert (kept.seed, kept.max_tokens, kept.extra_args) == (7, 3, {"a": 1})
    assert kept.allowed_token_ids is None
    assert kept.logit_bias is None
    assert added[1].sampling_params is None


def test_upstream_still_asks_where_we_answer() -> None:
    """Before it decides how a request ends, and with the statuses that we use."""
    import inspect

    source = inspect.getsource(OmniGenerationScheduler.update_from_output)
    asks = source.index("self._maybe_decode_pooling_output(request, pooler_output)")
    decides = source.index("request.status == RequestStatus.FINISHED_ERROR\n")
    assert asks < decides
