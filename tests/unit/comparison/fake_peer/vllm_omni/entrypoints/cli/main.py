"""Speaks the peer's protocol: text as it is, sound as base64 WAV files, in server-sent events.

Its speech has the length that was asked for; a prompt that holds "kkkkk" gets an error, as the peer words it.
"""

import argparse
import asyncio
import base64
import io
import json
import wave

from aiohttp import web

SAMPLES_PER_FRAME = 1920
STEP_S = 0.002


def wav(samples):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24000)
        out.writeframes(bytes(2 * samples))
    return base64.b64encode(file.getvalue()).decode()


async def complete(request):
    asked = await request.json()
    assert asked["stream"] and asked["modalities"] == ["text", "audio"] and asked["model"] == "peer"
    thinker, talker, _ = asked["sampling_params_list"]
    prompt = asked["messages"][0]["content"][0]["text"]
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)

    async def say(modality, content, finish=None, **more):
        choice = {"index": 0, "delta": {"role": "assistant", "content": content}, "finish_reason": finish}
        chunk = {"object": "chat.completion.chunk", "choices": [choice], "modality": modality, **more}
        await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())

    if "kkkkk" in prompt:
        await answer.write(b'data: {"error": {"message": "it is out of memory", "code": 500}}\n\n')
        return answer
    await say("text", "")
    for number in range(thinker["max_tokens"]):
        await asyncio.sleep(STEP_S)
        usage = {"prompt_tokens": len(prompt) + 8, "completion_tokens": number + 1, "total_tokens": 0}
        await say("text", f"<{number}>", usage=usage)
    left = talker["max_tokens"]
    size = 4
    while left:
        await asyncio.sleep(STEP_S)
        now, size = min(size, left), 25
        left -= now
        await say("audio", wav(now * SAMPLES_PER_FRAME), None if left else "stop")
    await answer.write(b"data: [DONE]\n\n")
    return answer


async def health(_):
    return web.Response()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("checkpoint")
    parser.add_argument("--omni", action="store_true", required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--deploy-config", type=argparse.FileType(), required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    deploy = json.load(args.deploy_config)
    assert [stage["load_format"] for stage in deploy["stages"]] == ["dummy"] * 3
    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/v1/chat/completions", complete)])
    web.run_app(app, host=args.host, port=args.port, print=None)


if __name__ == "__main__":
    main()
