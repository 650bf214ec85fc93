"""Ask a pipeline with NVIDIA's tritonclient alone, in ordinary code.

python plain_grpc_sync.py "Why is the sky blue?" --out reply.wav

The stream is decoupled: one request, many responses. Each has `event`, `index` and `text_output`; the last of
them is `done`.
"""

import argparse
import json
import queue
import sys
import wave

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException


def string_input(name: str, text: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    return tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))


def main(url: str, question: str, out: str) -> None:
    stream = grpcclient.InferInput("stream", [1], "BOOL").set_data_from_numpy(np.array([True]))
    sampling = string_input("sampling_parameters", json.dumps({"temperature": 0.7, "seed": 7}))
    responses: queue.SimpleQueue = queue.SimpleQueue()

    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: responses.put((result, error)))
        try:
            client.async_stream_infer(
                "smoltalk",
                [string_input("text_input", question), sampling, stream],
                parameters={"deadline_ms": 60_000},
            )
        except InferenceServerException as error:
            client.stop_stream()  # waits until what broke the stream, if it is broken, is in the queue
            responses.put((None, error))
        chunks = []
        try:
            while True:
                result, error = responses.get()
                if error is not None:
                    raise SystemExit(error.message())  # TRITONE_<CODE>: what is wrong; what to do
                print(b"".join(result.as_numpy("text_output")).decode(), end="", flush=True)
                event = result.as_numpy("event")[0].decode()
                if event == "audio":
                    rate_hz = int(result.as_numpy("sample_rate")[0])
                    chunks.append(result.as_numpy("audio_output"))  # int16 [n], mono
                if event == "done":
                    print("\n", result.as_numpy("finish_reason")[0].decode())
                    break
        except KeyboardInterrupt:
            client.stop_stream(cancel_requests=True)  # stops every stage; else the rest would be awaited
            raise
        client.stop_stream()

    if chunks:
        with wave.open(out, "wb") as wav:
            wav.setnchannels(1)
            wav.setsampwidth(2)
            wav.setframerate(rate_hz)
            wav.writeframes(np.concatenate(chunks).tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--out", default="reply.wav")
    args = parser.parse_args()
    try:
        main(args.url, args.question, args.out)
    except (InferenceServerException, OSError, KeyboardInterrupt) as error:
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else str(error))
