#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Serves MiMo-Audio with one of the plugin's stage configs until Ctrl-C. `serve.sh --help` says how to call it.
set -eu

usage() {
  cat <<'END'
Usage: serve.sh [MODEL] [OPTIONS]

MODEL     checkpoint folder or name; by default a small random one is generated
OPTIONS   of `vllm-omni serve`, for example --host 0.0.0.0 --port 8091

MIMO_AUDIO_TOKENIZER_PATH in the environment is the folder of the audio tokenizer. CONFIG there chooses the stage
config: mimo_audio, mimo_audio_low_latency (the default) or mimo_audio_high_throughput.

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

config=$(vllm-omni-audio-perf configs "${CONFIG:-mimo_audio_low_latency}")
if [ -z "$model" ]; then
  model=$(python -c '
from vllm_omni_audio_perf.testing.checkpoint_cache import cached_mimo_audio_checkpoint
print(cached_mimo_audio_checkpoint())')
  MIMO_AUDIO_TOKENIZER_PATH=$model/audio_tokenizer
  echo "No MODEL given: serving the generated random checkpoint $model. Its answers mean nothing." >&2
fi
if [ -z "${MIMO_AUDIO_TOKENIZER_PATH:-}" ]; then
  echo "serve.sh: set MIMO_AUDIO_TOKENIZER_PATH to the folder of the audio tokenizer" >&2
  exit 1
fi
export MIMO_AUDIO_TOKENIZER_PATH
exec vllm-omni serve "$model" --omni --deploy-config "$config" --host 127.0.0.1 "$@"
