# SPDX-License-Identifier: Apache-2.0
"""Good and bad requests of one offline `Omni`, in turn; writes what came of each as JSON. Run by a test."""

import copy
import json
import sys
from typing import Any

from vllm_omni.entrypoints.omni import Omni

CODES_OF_NO_CODEBOOK = {"allowed_token_ids": [8250], "max_tokens": 5}


def main(model: str, stage_config: str, result_file: str) -> None:
    """Run all requests. No `register()`: upstream's own scripts do not know it."""
    omni = Omni(model=model, deploy_config=stage_config)
    results: list[Any] = []

    def generate(talker: dict[str, Any] | None = None, **information: Any) -> None:
        params = copy.deepcopy(omni.default_sampling_params_list)
        for name, value in (talker or {}).items():
            setattr(params[1], name, value)
        prompt = {"prompt": "<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n"}
        prompts = [prompt, prompt | {"additional_information": information}]
        try:
            outputs = omni.generate(prompts, params)
        except ValueError as error:
            results.append(str(error))
            return
        audio = [output for output in outputs if output.final_output_type == "audio"]
        audio.sort(key=lambda output: int(output.request_id.split("_")[0]))
        results.append([output.multimodal_output["audio"].tolist() for output in audio])

    try:
        generate()
        generate(talker=CODES_OF_NO_CODEBOOK)
        generate(speaker=["Nobody"])
        generate(speaker=["ethan"])
        generate(seed=[7])
        generate()
    finally:
        omni.close()
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
