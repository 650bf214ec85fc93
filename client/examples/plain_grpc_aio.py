"""Ask a pipeline with NVIDIA's tritonclient alone, with asyncio, and stop it in the middle if asked to.

python plain_grpc_aio.py "Why is the sky blue?" --out reply.wav --stop-after-s 2
"""

import argparse
import asyncio
import sys
import wave

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient


def string_input(name: str, text: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    return tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))


async def main(url: str, question: str, out: str, stop_after_s: float | None) -> None:
    async def one_request():
        stream = grpcclient.InferInput("stream", [1], "BOOL").set_data_from_numpy(np.array([True]))
        yield {"model_name": "smoltalk", "inputs": [string_input("text_input", question), stream]}

    chunks, failure = [], None
    async with grpcclient.InferenceServerClient(url) as client:
        responses = client.stream_infer(one_request())
        try:
            async with asyncio.timeout(stop_after_s):
                async for result, error in responses:
                    if error is not None:
                        failure = error.message()  # TRITONE_<CODE>: what is wrong; what to do
                        continue  # to the stream's own end: a cancel just now would leave the request behind
                    print(b"".join(result.as_numpy("text_output")).decode(), end="", flush=True)
                    event = result.as_numpy("event")[0].decode()
                    if event == "audio":
                        rate_hz = int(result.as_numpy("sample_rate")[0])
                        chunks.append(result.as_numpy("audio_output"))  # int16 [n], mono
                    if event == "done":
                        print("\n", result.as_numpy("info")[0].decode())
        except grpc.RpcError as error:
            raise SystemExit(f"{error.code().name}: {error.details()}") from None
        except TimeoutError:
            print(f"\nstopped after {stop_after_s:g} s")
        finally:
            responses.cancel()  # stops every stage of the pipeline, if they still work
    if failure is not None:
        raise SystemExit(failure)

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
    parser.add_argument("--stop-after-s", type=float)
    args = parser.parse_args()
    try:
        asyncio.run(main(args.url, args.question, args.out, args.stop_after_s))
    except (OSError, KeyboardInterrupt) as error:
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else str(error))
