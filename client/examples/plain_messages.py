"""Send a conversation with a picture, with NVIDIA's tritonclient alone.

python plain_messages.py picture.png "What is in the picture?"

Media parts of `messages` stand for the media tensors: the first {"type": "image"} is the first of `image`.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException


def string_input(name: str, *values: bytes) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [len(values)], "BYTES")
    return tensor.set_data_from_numpy(np.array(values, dtype=np.object_))


def main(url: str, pipeline: str, picture: str, question: str) -> None:
    messages = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]},
    ]
    inputs = [
        string_input("messages", json.dumps(messages).encode()),
        string_input("image", Path(picture).read_bytes()),
        string_input("modalities", b"text"),  # starts no speech
    ]
    with grpcclient.InferenceServerClient(url) as client:
        # The twin that is not decoupled gives the whole answer in one response.
        result = client.infer(f"{pipeline}_sync", inputs)
    print(result.as_numpy("text_output")[0].decode())
    usage = json.loads(result.as_numpy("info")[0])["usage"]
    print(f"{usage['prompt_tokens']} tokens of prompt, {usage['completion_tokens']} of answer")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("picture")
    parser.add_argument("question", nargs="?", default="What is in the picture?")
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--pipeline", default="qwen3_omni")
    args = parser.parse_args()
    try:
        main(args.url, args.pipeline, args.picture, args.question)
    except (InferenceServerException, OSError, KeyboardInterrupt) as error:
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else str(error))
