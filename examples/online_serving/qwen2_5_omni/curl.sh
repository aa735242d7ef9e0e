#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Asks a running server one question with curl, prints the text of the answer and saves its sound.
set -eu

usage() {
  cat <<'END'
Usage: curl.sh [--url URL] [--voice NAME] [--seed N] [--output FILE] [QUESTION]

--url      of the server's API (default: http://127.0.0.1:8000/v1)
--voice    that answers (default: Ethan)
--seed     of the answer (default: 7)
--output   WAV file to write (default: output_audio/answer.wav)

Needs curl and python3.
END
}

fail() {
  echo "curl.sh: $*" >&2
  exit 1
}

url=http://127.0.0.1:8000/v1
voice=Ethan
seed=7
output=output_audio/answer.wav
question="Tell me about the sea."
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      usage
      exit
      ;;
    --url | --voice | --seed | --output)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --url) url=$2 ;;
        --voice) voice=$2 ;;
        --seed) seed=$2 ;;
        --output) output=$2 ;;
      esac
      shift 2
      ;;
    -*)
      fail "unknown option $1; curl.sh --help lists the options"
      ;;
    *)
      question=$1
      shift
      ;;
  esac
done

models=$(curl --silent --show-error --fail "$url/models") || fail "no server answers at $url"
request=$(python3 -c '
import json, sys

models, question, voice, seed = sys.argv[1:]
try:
    seed = int(seed)
except ValueError:
    sys.exit(f"curl.sh: --seed is {seed}; it has to be a whole number")
body = {
    "model": json.loads(models)["data"][0]["id"],
    "messages": [{"role": "user", "content": question}],
    "modalities": ["text", "audio"],
    "audio": {"voice": voice, "format": "wav"},
    "seed": seed,
}
print(json.dumps(body))
' "$models" "$question" "$voice" "$seed")

answer=$(mktemp)
trap 'rm -f "$answer"' EXIT
printf '%s' "$request" |
  curl --silent --show-error --fail-with-body --output "$answer" \
    --header "Content-Type: application/json" --data-binary @- "$url/chat/completions" ||
  fail "the server answered: $(cat "$answer")"
python3 -c '
import base64, json, os, sys, wave

answer, output = sys.argv[1:]
with open(answer, encoding="utf-8") as file:
    messages = [choice["message"] for choice in json.load(file)["choices"]]
print(*(message["content"] for message in messages if message.get("content")))
sound = [message["audio"]["data"] for message in messages if message.get("audio")]
if not sound:
    sys.exit("curl.sh: the answer has no sound")
os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
with open(output, "wb") as file:
    file.write(base64.b64decode(sound[0]))
with wave.open(output) as file:
    print(f"{output}: {file.getnframes() / file.getframerate():.2f} s at {file.getframerate()} Hz")
' "$answer" "$output"
