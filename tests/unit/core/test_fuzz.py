"""Whatever a client sends, a request is read or refused with one clear sentence; no decoder does worse.

The decoders run in a process of their own, since a fault in one of their libraries would end this one:

    python tests/unit/core/test_fuzz.py SEED COUNT     mutates real files, prints what was worse than refused
"""

import dataclasses
import io
import json
import random
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tritone import contract, deploy_reader
from tritone.audio import AudioLimits, decode_audio
from tritone.deploy import Urls
from tritone.errors import InvalidRequest, Unsupported
from tritone.ports import NUMPY_DTYPES
from tritone.request import MEDIA, check_supported, read_request
from tritone.vision import VideoLimits, decode_image, decode_video

REPOSITORY = Path(__file__).parents[3] / "model_repository"
SMALLTALK = deploy_reader.load(REPOSITORY / "smoltalk" / "deploy.yaml")
ALL_MEDIA = (contract.IMAGE, contract.VIDEO)
DEPLOY = dataclasses.replace(
    SMALLTALK,
    pipeline=dataclasses.replace(SMALLTALK.pipeline, accepts=(*SMALLTALK.pipeline.accepts, *ALL_MEDIA)),
    urls=Urls(allow=("media.example",)),
)
PORTS = DEPLOY.pipeline.inputs
MOST_PIXELS = 4_000_000
MOST_MIB = 500  # that the decoders may take beyond what importing them takes
MOST_S = 10.0  # of processor time for one file
NUM_MUTANTS = 2000


# -- requests ----------------------------------------------------------------------------------------------

WORDS = [
    *("role", "content", "type", "text", "image", "audio", "video", "user", "assistant", "system"),
    *("temperature", "seed", "stop", "max_tokens", "thinker", "talker", "top_p", "input_audio", "image_url"),
]
words = st.sampled_from(WORDS)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=20)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
parts = st.fixed_dictionaries({"type": words}, optional={"text": st.text(max_size=9) | scalars})
messages = st.lists(
    st.fixed_dictionaries(
        {"role": words, "content": st.text(max_size=9) | st.lists(parts, max_size=3) | trees},
        optional={"name": scalars},
    ),
    max_size=3,
)
deep = st.integers(1, 20_000).map(lambda depth: "[" * depth) | st.integers(1, 3000).map(
    lambda depth: '{"a":' * depth + "1" + "}" * depth
)
texts = (
    st.text(max_size=40)
    | (trees | messages).map(json.dumps)
    | deep
    | st.sampled_from(
        ["text", "audio", "text,audio", "wav", "nan", "-0", "1e999", '{"seed": 1e400}', '"\\ud800"']
    )
)
data = (
    st.binary(max_size=40)
    | texts.map(lambda text: text.encode(errors="surrogatepass"))
    | st.sampled_from([b"file:///etc/passwd", b"http://media.example/a", b"http://169.254.169.254/", b"RIFF"])
)


@st.composite
def tensors(draw, port):
    """A tensor of the port's type, as Triton lets it through: any shape, and any bytes for STRING."""
    shape = draw(st.just(tuple(1 if dim == -1 else dim for dim in port.dims)) | st.tuples(st.integers(0, 3)))
    if draw(st.integers(0, 9)) == 0:
        shape = draw(st.lists(st.integers(0, 2), max_size=3).map(tuple))
    size = int(np.prod(shape))
    if port.dtype == "STRING":
        array = np.empty(size, object)
        array[:] = [draw(data) for _ in range(size)]
        return array.reshape(shape)
    dtype = np.dtype(NUMPY_DTYPES[port.dtype])
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    array = np.frombuffer(raw, np.uint8)
    if port.dtype == "BOOL":
        return (array % 2).astype(bool).reshape(shape)
    return array.view(dtype).reshape(shape)


requests = st.fixed_dictionaries({}, optional={port.name: tensors(port) for port in PORTS})
parameters = st.dictionaries(
    st.sampled_from([*contract.PARAMETERS, "temperature", "sequence_id", ""]) | st.text(max_size=9),
    st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.text(max_size=9)
    | st.sampled_from(["1e999", "nan", "2"]),
    max_size=3,
)
many = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


def read(arrays, given_parameters):
    """What the pipeline door does with a request, up to its plan."""
    by_name = {port.name: port for port in PORTS}
    values = {name: by_name[name].unpack(array) for name, array in arrays.items()}
    request = read_request(values, given_parameters, DEPLOY, drawn_seed=1)
    check_supported(request, DEPLOY.pipeline)
    DEPLOY.pipeline.plan(request)
    return request


@many
@given(requests, parameters)
def test_any_tensors_and_parameters_are_read_or_refused(arrays, given_parameters):
    try:
        request = read(arrays, given_parameters)
    except (InvalidRequest, Unsupported) as refusal:
        assert len(refusal.message) < 800 and refusal.message.isprintable()
        return
    assert json.loads(request.messages_json)
    assert {kind: request.parts(kind) for kind in MEDIA} == {
        kind: len(request.media.get(kind, ())) + (kind == "audio" and request.audio_input is not None)
        for kind in MEDIA
    }


@many
@given(texts, st.sampled_from(["messages", "sampling_parameters"]), parameters)
def test_any_json_is_read_or_refused(text, field, given_parameters):
    values = {field: text, **({"text_input": "Hi"} if field != "messages" else {})}
    try:
        request = read_request(values, given_parameters, DEPLOY, drawn_seed=1)
    except (InvalidRequest, Unsupported) as refusal:
        assert len(refusal.message) < 800 and refusal.message.isprintable()
        return
    assert json.loads(request.messages_json)
    json.dumps([sampling.as_dict() for sampling in request.sampling.values()], allow_nan=False)


# -- files -------------------------------------------------------------------------------------------------


def pictures():
    from PIL import Image

    gradient = np.add.outer(np.arange(60), np.arange(90)).astype(np.uint8)
    image = Image.fromarray(np.stack([gradient, gradient.T[:60, :60].repeat(2, 1)[:, :90], gradient], -1))
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"):
        out = io.BytesIO()
        image.save(out, kind)
        yield out.getvalue()


def recordings():
    import soundfile

    samples = np.sin(np.arange(8000) / 20).astype(np.float32) / 2
    for kind, subtype in (("WAV", None), ("FLAC", None), ("MP3", None), ("OGG", "VORBIS"), ("WAV", "FLOAT")):
        out = io.BytesIO()
        soundfile.write(out, samples, 8000, format=kind, subtype=subtype)
        yield out.getvalue()


def videos():
    import av

    for kind, codec in (("mp4", "mpeg4"), ("matroska", "mjpeg"), ("avi", "mpeg4"), ("mpegts", "mpeg2video")):
        out = io.BytesIO()
        with av.open(out, "w", kind) as container:
            stream = container.add_stream(codec, rate=25)
            stream.width, stream.height = 64, 48
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            for number in range(12):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number * 20, np.uint8))
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        yield out.getvalue()


DECODERS = {
    "image": (pictures, lambda file: decode_image(file, MOST_PIXELS)),
    "audio": (recordings, lambda file: decode_audio(file, AudioLimits(max_seconds=60))),
    "video": (videos, lambda file: decode_video(file, VideoLimits(max_seconds=60, max_pixels=MOST_PIXELS))),
}


def mutant(rng, file, others):
    """The file with one to four faults: bits, numbers, holes, repeats, parts of others, an early end."""
    data = bytearray(file)
    for _ in range(rng.randint(1, 4)):
        # The fields that lie about sizes are near the beginning.
        at = rng.randrange(min(len(data), 200) if rng.random() < 0.6 else len(data)) if data else 0
        size = rng.randrange(1, 64)
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                number = rng.choice([0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)])
                data[at : at + 4] = struct.pack(rng.choice("<>") + "I", number)
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = data[at : at + size] * rng.randrange(1, 40)
            case 4:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                data[at : at + size] = other[start : start + size]
            case 5:
                del data[rng.randrange(max(1, len(data))) :]
            case 6:
                data[at : at + size] = rng.randbytes(size)
    return bytes(data)


def worse_than_refused(seed, count):
    """Mutates and decodes; a line for each fault. Says how it went in the last line, as JSON."""
    rng, counts = random.Random(seed), {"decoded": 0, "refused": 0}
    files = {kind: list(make()) for kind, (make, _) in DECODERS.items()}
    everything = [file for some in files.values() for file in some]
    for kind, (_, decode) in DECODERS.items():
        for file in files[kind]:
            decode(file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest_s = 0.0
    for number in range(count):
        kind = rng.choice(list(DECODERS))
        file = mutant(rng, rng.choice(files[kind]), everything)
        began_s = time.process_time()
        try:
            DECODERS[kind][1](file)
            counts["decoded"] += 1
        except InvalidRequest as refusal:
            counts["refused"] += 1
            if not refusal.message.isprintable() or len(refusal.message) > 700:
                print(f"{kind} {number}: says {refusal.message!r}")
        except Exception as fault:
            print(f"{kind} {number}: {fault!r}")
        slowest_s = max(slowest_s, time.process_time() - began_s)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(json.dumps({**counts, "slowest_s": round(slowest_s, 3), "grown_mib": grown}))


@pytest.mark.parametrize("seed", [1])
def test_decoders_refuse_damaged_files_within_bounds(seed):
    done = subprocess.run(
        [sys.executable, __file__, str(seed), str(NUM_MUTANTS)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    *faults, last = done.stdout.splitlines()
    assert faults == []
    figures = json.loads(last)
    assert figures["decoded"] > NUM_MUTANTS // 20 and figures["refused"] > NUM_MUTANTS // 20, figures
    assert figures["slowest_s"] < MOST_S and figures["grown_mib"] < MOST_MIB, figures


if __name__ == "__main__":
    worse_than_refused(int(sys.argv[1]), int(sys.argv[2]))
