# SPDX-License-Identifier: Apache-2.0
"""Errors travel beside the waveforms, one entry a request."""

import pytest
import torch

from vllm_omni_audio_perf.scheduling.request_errors import ERROR_OUTPUT, error_outputs, take_error


@pytest.mark.parametrize("errors", [[], [None], [None, None]])
def test_a_step_without_a_failure_has_no_such_output(errors: list[None]) -> None:
    assert error_outputs(errors) == {}


def test_each_request_gets_its_own() -> None:
    errors = [None, "code 8250 is not in the codebook", None, "zu groß: 3 \N{GREEK SMALL LETTER MU}"]
    (entries,) = error_outputs(errors).values()
    waveform = torch.zeros(3)
    outputs = [{"model_outputs": waveform, ERROR_OUTPUT: entry} for entry in entries]
    assert [take_error(output) for output in outputs] == errors
    assert all(list(output) == ["model_outputs"] for output in outputs)  # clients never see it


@pytest.mark.parametrize("output", [None, {}, {"model_outputs": torch.zeros(3)}, torch.zeros(3)])
def test_outputs_without_an_error(output: object) -> None:
    assert take_error(output) is None
