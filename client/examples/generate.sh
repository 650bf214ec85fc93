#!/usr/bin/env bash
# Ask a pipeline over HTTP with curl and wait for the whole answer, in one JSON object.
#
#   ./generate.sh "Why is the sky blue?" --url http://127.0.0.1:8000 --out reply.wav
set -euo pipefail

question="Why is the sky blue?" url="http://127.0.0.1:8000" out="reply.wav"
while (($#)); do
    case $1 in
        --url) url=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        *) question=$1; shift ;;
    esac
done

body=$(python3 -c 'import json, sys; print(json.dumps({
    "text_input": sys.argv[1], "stream": False, "audio_format": "s16_base64"}))' "$question")

curl -sS --fail-with-body "$url/v2/models/smoltalk/generate" -d "$body" |
    python3 -c '
import base64, json, sys, wave
body = sys.stdin.read()
if not body:
    sys.exit(1)  # curl has said why
answer = json.loads(body)
if "error" in answer:
    sys.exit(answer["error"])
print(answer["text_output"])
samples = base64.b64decode(answer.get("audio_encoded", ""))
if samples:
    with wave.open(sys.argv[1], "wb") as wav:
        wav.setparams((1, 2, answer["sample_rate"], 0, "NONE", ""))
        wav.writeframes(samples)
' "$out"
