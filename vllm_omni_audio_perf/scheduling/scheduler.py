# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's scheduler for generation stages, which also ends the requests that the stage reports as failed."""

from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler
from vllm_omni.outputs import OmniModelRunnerOutput

from vllm_omni_audio_perf.scheduling.request_errors import take_error


class AudioPerfGenerationScheduler(OmniGenerationScheduler):
    """Ends a failed request with ``FINISHED_ERROR`` and its reason, and no other.

    Upstream asks for a request's decoded pooling output right before it decides how the request ends, and leaves one
    alone that has failed by then. A stage of ours has no pooling output, so this is where its failures are entered.
    """

    _failed_requests: dict[str, str]
    """Request id -> reason, of the step whose outputs are being taken in."""

    def add_request(self, request: Request) -> None:
        """Keep of the sampling parameters what such a stage reads, for it samples nothing.

        vLLM-Omni checks those of the first stage alone; a token id that this stage's vocabulary has not would end it.
        """
        given = request.sampling_params
        if given is not None:
            request.sampling_params = SamplingParams(
                temperature=0.0, seed=given.seed, max_tokens=given.max_tokens, extra_args=given.extra_args
            )
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: OmniModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = getattr(model_runner_output, "multimodal_outputs", None) or []
        errors = {
            request_id: take_error(outputs[index])
            for request_id, index in model_runner_output.req_id_to_index.items()
            if index < len(outputs)
        }
        self._failed_requests = {request_id: error for request_id, error in errors.items() if error}
        return super().update_from_output(scheduler_output, model_runner_output)

    def _maybe_decode_pooling_output(self, request: Request, pooler_output: Any) -> Any:
        error = self._failed_requests.get(request.request_id)
        if error is None:
            return super()._maybe_decode_pooling_output(request, pooler_output)
        request.status = RequestStatus.FINISHED_ERROR
        request.stop_reason = error  # what the client is told
        request.resumable = False
        return None
