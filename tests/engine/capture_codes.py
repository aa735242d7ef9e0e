# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin, of the tests alone, that writes down the codes that the talker sends to code2wav."""

import functools
import json
import os
from typing import Any

CODES_FILE = "AUDIO_PERF_TEST_CODES"
ENTRY_POINTS = """\
[vllm.general_plugins]
capture_codes = capture_codes:install
"""


def install() -> None:
    """Wrap the talker's output processor so that it appends one line of codes a request to the file of `CODES_FILE`."""
    from vllm_omni.model_executor.stage_input_processors import qwen2_5_omni

    upstream = qwen2_5_omni.talker2code2wav_full_payload
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def recording(*args: Any, **kwargs: Any) -> Any:
        payload = upstream(*args, **kwargs)
        with open(os.environ[CODES_FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps(payload["codes"]["audio"]) + "\n")
        return payload

    qwen2_5_omni.talker2code2wav_full_payload = recording
