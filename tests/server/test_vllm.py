"""Qwen3-Omni with its Thinker on vLLM, on a real tritonserver: equal to the reference, and tidy.

`make test-vllm` names the interpreter that has vLLM; without one there is nothing to test here.
"""

import asyncio
import os
import time

import numpy as np
import pytest

for package in ("torch", "transformers", "torchvision", "av", "PIL"):
    pytest.importorskip(package)

import qwen3_omni_tiny  # noqa: E402
from qwen3_omni_reference import Reference, cases  # noqa: E402

from tritone.checkpoint import checkpoint_dir  # noqa: E402
from tritone_client import TextDelta  # noqa: E402
from waiting import PATIENCE_S  # noqa: E402

PYTHON = os.environ.get("TRITONE_VLLM_PYTHON")
PIPELINE = "qwen3_omni"
CASES = cases()
ASKED = ("stops", "image_audio", "video")

pytestmark = [
    pytest.mark.server,
    pytest.mark.weights,
    pytest.mark.skipif(not PYTHON, reason="TRITONE_VLLM_PYTHON names no interpreter that has vLLM"),
]


@pytest.fixture(scope="module")
def checkpoint():
    qwen3_omni_tiny.main(["--wide"])
    return checkpoint_dir(qwen3_omni_tiny.WIDE)


@pytest.fixture(scope="module")
def server(serve, checkpoint):
    thinker = ["kind=vllm", "max_slots=8", "max_context_tokens=1024", "engine_args.enforce_eager=true"]
    return serve(
        PIPELINE,
        overrides=[
            f"checkpoint={checkpoint}",
            f"stage.thinker.python={PYTHON}",
            *(f"stage.thinker.engine.{option}" for option in thinker),
        ],
    )


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What the reference answers."""
    reference = Reference(checkpoint)
    return {name: reference.answer(CASES[name]) for name in ASKED}


def options_of(case):
    talker = {"max_tokens": case.talker_max_tokens, "repetition_penalty": case.talker_repetition_penalty}
    return {
        "messages": case.messages,
        "images": case.image_files,
        "audios": case.audio_files,
        "videos": case.video_files,
        "use_audio_in_video": case.use_audio_in_video or None,
        "speaker": case.speaker,
        "sampling": {
            "thinker": {"temperature": 0, "max_tokens": case.thinker_max_tokens},
            "talker": {"temperature": 0, **talker},
        },
        "audio_format": "f32",
    }


async def test_answers_are_the_references(server, expected):
    async with server.client(PIPELINE) as client:
        answers = await asyncio.gather(*(client.ask(None, **options_of(CASES[name])) for name in ASKED))
    for name, answer in zip(ASKED, answers, strict=True):
        wanted = expected[name]
        assert answer.text == wanted.text.rstrip("\ufffd")  # of a character that is cut nothing is told
        assert answer.samples.shape == wanted.waveform.shape
        assert np.abs(answer.samples - wanted.waveform).max() <= 1e-4
        assert answer.done.usage["prompt_tokens"] == len(wanted.prompt_ids)
        assert answer.done.usage["completion_tokens"] == len(wanted.text_ids)


async def test_who_leaves_gives_the_cache_back(server):
    endless = {"thinker": {"ignore_eos": True, "max_tokens": 900}, "talker": {"min_tokens": 2000}}
    async with server.client(PIPELINE) as client:
        async for event in client.stream("Tell me about the sea.", sampling=endless):
            if isinstance(event, TextDelta):
                break
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            stages = await client.ping(PATIENCE_S)
            [engine] = stages["thinker"]["engines"]
            if engine["active"] == engine["kv_tokens"] == 0:
                break
            assert time.monotonic() < deadline_s, engine
            await asyncio.sleep(0.05)


async def test_a_prompt_beyond_the_context_is_told_by_the_thinker(server):
    from tritone_client import InvalidRequest

    async with server.client(PIPELINE) as client:
        with pytest.raises(InvalidRequest, match="prompt and answer together may have 1024"):
            await client.ask("long word " * 800, modalities="text")


async def test_what_vllm_refuses_ends_no_other_answer(server):
    from tritone_client import InvalidRequest

    picture = CASES["image_audio"].image_files[0]
    long = {"thinker": {"ignore_eos": True, "max_tokens": 200}}
    async with server.client(PIPELINE) as client:
        others = [
            asyncio.create_task(client.ask("Why?", modalities="text", sampling=long, seed=seed))
            for seed in range(4)
        ]
        with pytest.raises(InvalidRequest, match=r"temperature must be in .* got 3\.0; change its settings"):
            await client.ask("What?", image=picture, modalities="text", temperature=3.0)
        for answer in await asyncio.gather(*others):
            assert answer.done.usage["completion_tokens"] == 200
