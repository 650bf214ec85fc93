#!/usr/bin/env bash
# Ask a pipeline over HTTP with curl; text and audio stream back as server-sent events.
#
#   ./generate_stream.sh "Why is the sky blue?" --url http://127.0.0.1:8000 --out reply.wav
#
# JSON has no bytes, so audio_format s16_base64 asks for 16-bit samples as base64, one piece per event.
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
    "text_input": sys.argv[1], "stream": True, "audio_format": "s16_base64"}))' "$question")

curl -sS --no-buffer --fail-with-body "$url/v2/models/smoltalk/generate_stream" -d "$body" |
    python3 -c '
import base64, json, sys, wave
samples, rate_hz = b"", None
for line in sys.stdin:
    event = json.loads(line.removeprefix("data:")) if line.strip() else {}
    if "error" in event:
        sys.exit(event["error"])
    print(event.get("text_output", ""), end="", flush=True)
    samples += base64.b64decode(event.get("audio_encoded", ""))
    rate_hz = event.get("sample_rate", rate_hz)
print()
if samples:
    with wave.open(sys.argv[1], "wb") as wav:
        wav.setparams((1, 2, rate_hz, 0, "NONE", ""))
        wav.writeframes(samples)
' "$out"
