"""What the client sends is what the library declares."""

from typing import get_args

import numpy as np
import pytest
from tritonclient.utils import np_to_triton_dtype

from tritone_client.events import FinishReason
from tritone_client.request import AUDIO_FORMATS, build_request, operation_request

contract = pytest.importorskip("tritone.contract")

FULL = build_request(
    messages=[{"role": "user", "content": "hi"}],
    audio=(np.zeros(3, dtype=np.float32), 16_000),
    image=[b"png", b"png"],
    video=b"mp4",
    modalities="text",
    speaker="Ethan",
    language="en",
    instructions="whisper",
    seed=1,
    audio_format="f32",
    return_timings=True,
)
INPUTS = {**FULL.inputs, **build_request("hi", audio=b"wav").inputs, **operation_request("ping", 1.0).inputs}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_have_the_declared_name_type_and_rank(name):
    port = getattr(contract, name.upper())
    dtype = np_to_triton_dtype(INPUTS[name].dtype)
    assert port.name == name
    assert port.dtype == ("STRING" if dtype == "BYTES" else dtype)
    assert len(port.dims) == INPUTS[name].ndim
    assert all(declared in (-1, given) for declared, given in zip(port.dims, INPUTS[name].shape, strict=True))


def test_audio_formats_are_the_declared_ones():
    assert AUDIO_FORMATS == contract.AUDIO_FORMATS


def test_finish_reasons_are_the_declared_ones():
    assert set(get_args(FinishReason)) == set(contract.FINISH_REASONS)


@pytest.mark.parametrize("growth", [2, 1.5])
def test_parameters_have_the_declared_name_and_type(growth):
    request = build_request(
        video=b"mp4",
        use_audio_in_video=True,
        initial_codec_chunk_frames=2,
        codec_chunk_frames=9,
        codec_chunk_growth=growth,
        deadline_s=1.0,
    )
    assert len(request.parameters) == 5
    for name, value in request.parameters.items():
        kind = contract.PARAMETERS[name]
        assert float(value) == growth if kind is float else type(value) is kind


def test_the_deadline_is_a_declared_parameter():
    assert contract.PARAMETERS["deadline_ms"] is int
    assert build_request("hi", deadline_s=1.5).parameters == {"deadline_ms": 1500}
