#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Serves Qwen2.5-Omni with the plugin's stage config until Ctrl-C. `serve.sh --help` says how to call it.
set -eu

usage() {
  cat <<'END'
Usage: serve.sh [MODEL] [OPTIONS]

MODEL     checkpoint folder or name; by default a small random one is generated
OPTIONS   of `vllm-omni serve`, for example --host 0.0.0.0 --port 8091

Listens at 127.0.0.1:8000 unless OPTIONS say otherwise. Needs the environment of vLLM-Omni and the plugin to be active.
END
}

case ${1:-} in
  -h | --help)
    usage
    exit
    ;;
  "" | -*)
    model=
    ;;
  *)
    model=$1
    shift
    ;;
esac

for command in vllm-omni vllm-omni-audio-perf python; do
  if ! command -v "$command" >/dev/null; then
    echo "serve.sh: there is no command $command; activate the environment that the plugin is installed in" >&2
    exit 1
  fi
done

config=$(vllm-omni-audio-perf configs qwen2_5_omni)
if [ -z "$model" ]; then
  model=$(python -c '
from vllm_omni_audio_perf.testing.checkpoint_cache import cached_qwen2_5_omni_checkpoint
print(cached_qwen2_5_omni_checkpoint())')
  echo "No MODEL given: serving the generated random checkpoint $model. Its answers mean nothing." >&2
fi
exec vllm-omni serve "$model" --omni --deploy-config "$config" --host 127.0.0.1 "$@"
