"""Ask aloud without sending the sound: the samples lie in shared memory, the answer is one response.

python plain_shared_memory.py question.wav --out reply.wav

Client and server must share a machine. Shared memory goes with unary calls, so this asks the pipeline's twin
`smoltalk_sync`, which is not decoupled. Only tritonclient and numpy are needed.
"""

import argparse
import contextlib
import os
import sys
import wave

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException


def read_question(path: str) -> tuple[np.ndarray, int]:
    """Mono float32 samples in [-1, 1] and their rate in Hz, from a 16-bit WAV file."""
    try:
        with wave.open(path) as wav:
            if wav.getsampwidth() != 2 or not wav.getnframes():
                raise SystemExit(f"{path} is not 16-bit PCM, or empty")
            frames = np.frombuffer(wav.readframes(wav.getnframes()), dtype="<i2")
            samples = frames.reshape(-1, wav.getnchannels()).mean(axis=1) / 32768
            return samples.astype(np.float32), wav.getframerate()
    except (wave.Error, EOFError):
        raise SystemExit(f"{path} is not a PCM WAV file") from None


def main(url: str, question: str, out: str) -> None:
    samples, rate_hz = read_question(question)
    name = f"question_{os.getpid()}"
    region = shm.create_shared_memory_region(name, name, samples.nbytes, create_only=True)
    try:
        shm.set_shared_memory_region(region, [samples])
        with grpcclient.InferenceServerClient(url) as client:
            client.register_system_shared_memory(name, f"/{name}", samples.nbytes)
            try:
                audio = grpcclient.InferInput("audio_input", [samples.size], "FP32")
                audio.set_shared_memory(name, samples.nbytes)
                rate = grpcclient.InferInput("audio_input_rate", [1], "INT32")
                rate.set_data_from_numpy(np.array([rate_hz], dtype=np.int32))
                result = client.infer("smoltalk_sync", [audio, rate])
            finally:
                with contextlib.suppress(InferenceServerException):  # an error of the request says more
                    client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(region)

    print(b"".join(result.as_numpy("text_output")).decode())
    reply = result.as_numpy("audio_output")  # int16 [n], mono
    if reply is not None and reply.size:
        with wave.open(out, "wb") as wav:
            wav.setnchannels(1)
            wav.setsampwidth(2)
            wav.setframerate(int(result.as_numpy("sample_rate")[0]))
            wav.writeframes(reply.tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question", help="a 16-bit WAV file")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--out", default="reply.wav")
    args = parser.parse_args()
    try:
        main(args.url, args.question, args.out)
    except (InferenceServerException, OSError, KeyboardInterrupt) as error:
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else str(error))
