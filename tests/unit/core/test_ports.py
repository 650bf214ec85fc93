"""Ports: what a client sends becomes a plain value, or one clear sentence."""

import numpy as np
import pytest

from tritone.errors import InvalidRequest
from tritone.ports import Port

TEXT = Port("text_input", "STRING", (1,), "prompt")
FILES = Port("audio", "STRING", (-1,), "files")
RATE = Port("rate", "INT32", (1,), "Hz")
FLAG = Port("stream", "BOOL", (1,), "stream")
FRAMES = Port("frames", "FP32", (-1, 3), "frames")


@pytest.mark.parametrize(
    ("port", "value"),
    [(TEXT, "聪明 🙂"), (RATE, 16000), (FLAG, True), (FILES, [b"\x00RIFF", b""])],
    ids=lambda item: getattr(item, "name", None),
)
def test_a_plain_value_survives_packing(port, value):
    assert port.unpack(port.pack(value)) == value


def test_arrays_keep_shape_and_get_the_ports_dtype():
    packed = FRAMES.pack(np.arange(6, dtype=np.float64).reshape(2, 3))
    assert packed.dtype == np.float32 and packed.shape == (2, 3)
    assert FRAMES.unpack(packed) is packed


def test_scalars_become_one_element_tensors():
    assert RATE.pack(8000).shape == (1,) and RATE.pack(8000).dtype == np.int32


@pytest.mark.parametrize(
    ("port", "array", "words"),
    [
        (TEXT, np.array([b"\xff\xfe"], object), ["text_input", "UTF-8", "0xff"]),
        (TEXT, np.array([b"a", b"b"], object), ["text_input", "[2]", "[1]"]),
        (FRAMES, np.zeros((2, 4), np.float32), ["frames", "[2, 4]", "[-1, 3]"]),
        (FRAMES, np.zeros(3, np.float32), ["frames", "[3]"]),
    ],
)
def test_bad_tensors_are_refused_by_name(port, array, words):
    with pytest.raises(InvalidRequest) as refusal:
        port.unpack(array)
    assert all(word in refusal.value.message for word in words)
    assert refusal.value.cure


def test_an_unknown_dtype_is_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'FP32'"):
        Port("x", "FP23", (1,), "")
