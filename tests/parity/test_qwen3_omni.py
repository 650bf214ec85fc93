"""Qwen3-Omni's stages against the reference: the same tokens, the same codes, the same waveform.

The stages run in one process, fed by each other as they are in a server (tests/server/test_qwen3_omni.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

for package in ("torch", "transformers", "torchvision", "av", "PIL"):
    pytest.importorskip(package)

import qwen3_omni_oracle as oracle  # noqa: E402
import torch  # noqa: E402
from qwen3_omni_oracle import CASES  # noqa: E402

from tritone.deploy import Chunks  # noqa: E402
from tritone.engines.base import Chunk, Placement  # noqa: E402
from tritone.pipelines.qwen3_omni.code2wav import Code2Wav  # noqa: E402
from tritone.pipelines.qwen3_omni.talker import Talker, TalkerOptions  # noqa: E402
from tritone.pipelines.qwen3_omni.thinker import Thinker, ThinkerOptions  # noqa: E402
from tritone.stream import FrameBuffer  # noqa: E402

HANDED_OVER = ("prompt_ids", "prompt_positions", "media_rows", "token_ids")
WHOLE = Chunks(initial_codec_chunk_frames=4096, codec_chunk_frames=4096)
STREAMED = Chunks(initial_codec_chunk_frames=4, codec_chunk_frames=25)
SCHEDULES = {
    "streamed": STREAMED,
    "frame by frame": Chunks(initial_codec_chunk_frames=1, codec_chunk_frames=1),
    "growing": Chunks(initial_codec_chunk_frames=2, codec_chunk_frames=7, codec_chunk_growth=1.5),
}


@dataclass
class Result:
    """What the stages made of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    frames: list[np.ndarray] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    order: str = ""  # t: the thinker said something, F: a frame came

    @property
    def codes(self) -> np.ndarray:
        """int [codebooks, T]"""
        return np.concatenate(self.frames).T


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no NVIDIA GPU")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, GPU])])
def stages(request):
    return stages_on(request.param)


def stages_on(device):
    torch.set_num_threads(1)
    place = Placement(oracle.checkpoint(), device)
    return SimpleNamespace(
        thinker=Thinker(place, ThinkerOptions(max_slots=12, prefill_chunk_tokens=64)),
        talker=Talker(place, TalkerOptions(max_slots=12, prefill_chunk_tokens=64)),
        code2wav=Code2Wav(place, Code2Wav.Options()),
    )


def start(stages, name, case, seed=0, talker_temperature=0.0):
    inputs = {"messages": json.dumps(parts_of(case.messages))}
    for kind in ("image", "audio", "video"):
        files = getattr(case, f"{kind}_files")
        if files:
            inputs[kind] = files
    stages.talker.add_request(
        name,
        {},
        {
            "speaker": case.speaker,
            "sampling": {
                "temperature": talker_temperature,
                "top_k": 50 if talker_temperature else 0,
                "max_tokens": case.talker_max_tokens,
                "repetition_penalty": case.talker_repetition_penalty,
                "seed": seed,
            },
        },
    )
    stages.thinker.add_request(
        name,
        inputs,
        {
            "sampling": {"temperature": 0.0, "max_tokens": case.thinker_max_tokens},
            "speaks": True,
            "use_audio_in_video": case.use_audio_in_video,
        },
    )


def parts_of(messages):
    """Messages as the orchestrator gives them: content is a list of parts."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
        for m in messages
    ]


def run(stages, names, sync=False):
    """Turn both engines until all are done; `sync`: the talker gets nothing before the thinker has ended."""
    results = {name: Result() for name in names}
    held = {name: [] for name in names}
    while any(len(result.reasons) < 2 for result in results.values()):
        for delta in stages.thinker.step():
            assert delta.error is None, delta.error
            result = results[delta.session]
            result.order += "t"
            result.text += delta.outputs.get("text", "")
            handed = {port: delta.outputs[port] for port in HANDED_OVER if port in delta.outputs}
            held[delta.session].append(handed)
            ended = delta.finish_reason is not None
            if ended:
                result.reasons["thinker"] = delta.finish_reason
            if ended or not sync:
                for i, piece in enumerate(pieces := held[delta.session]):
                    stages.talker.push(delta.session, piece, ended and i + 1 == len(pieces))
                pieces.clear()
        for delta in stages.talker.step():
            assert delta.error is None, delta.error
            result = results[delta.session]
            if "frames" in delta.outputs:
                result.order += "F"
                result.frames.append(delta.outputs["frames"])
            if delta.finish_reason is not None:
                result.reasons["talker"] = delta.finish_reason
    for engine in (stages.thinker, stages.talker):
        engine.check_integrity()
        assert engine.stats()["active"] == 0
    return results


def waveform(code2wav, name, codes, chunks=WHOLE):
    """The sound of codes [codebooks, T], cut as `chunks` says."""
    buffer = FrameBuffer(chunks)
    pieces = [piece for frame in codes.T for piece in buffer.push(frame[None].astype(np.int32))]
    pieces.append(buffer.finish())
    sounds = []
    for i, piece in enumerate(pieces):
        inputs = {"frames": piece.frames} if len(piece.frames) else {}
        [answer] = code2wav.run([Chunk(name, inputs, start=i == 0, end=piece.last)])
        sounds.append(answer["pcm"])
    assert code2wav.stats()["active"] == 0
    return np.concatenate(sounds)


def assert_equal(result, expected):
    assert result.codes.tolist() == expected.codes.tolist()
    assert result.text == expected.text
    cut = expected.thinker_finish == "length"
    assert result.reasons == {"thinker": "length" if cut else "stop", "talker": expected.talker_finish}


# -- equal to the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_the_references(stages, name):
    expected = oracle.answer(name)
    start(stages, name, CASES[name])
    thinking = stages.thinker._sessions[name]
    result = run(stages, [name])[name]
    assert thinking.tokens[: thinking.prompt_tokens] == expected.prompt_ids.tolist()
    assert thinking.tokens[thinking.prompt_tokens :] == expected.text_ids.tolist()
    assert_equal(result, expected)
    sound = waveform(stages.code2wav, name, result.codes)
    assert sound.shape == expected.waveform.shape
    assert np.abs(sound - expected.waveform).max() <= 1e-5


@pytest.mark.parametrize("chunks", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("name", ["stops", "image_audio"])
def test_a_streamed_waveform_is_the_references(stages, name, chunks):
    expected = oracle.answer(name)
    sound = waveform(stages.code2wav, name, expected.codes, chunks)
    assert sound.shape == expected.waveform.shape
    assert np.abs(sound - expected.waveform).max() <= 1e-4


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_all_answers_at_once_are_the_references(stages, sync):
    for name, case in CASES.items():
        start(stages, name, case)
    results = run(stages, CASES, sync)
    for name, result in results.items():
        assert_equal(result, oracle.answer(name))


def test_sync_waits_and_async_overlaps(stages):
    case = CASES["stops"]
    for sync in (False, True):
        start(stages, "x", case)
        order = run(stages, ["x"], sync)["x"].order
        first_frame, last_text = order.index("F"), order.rindex("t")
        assert (first_frame > last_text) == sync
    # The first chunk of four frames leaves before the thinker's last token.
    start(stages, "x", case)
    order = run(stages, ["x"])["x"].order
    assert [i for i, kind in enumerate(order) if kind == "F"][3] < order.rindex("t")


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_how_a_prompt_is_cut_changes_nothing(stages, monkeypatch, chunk):
    name = "image_audio"
    for engine in (stages.thinker, stages.talker):
        options = SimpleNamespace(**{**vars(engine._slot_options), "prefill_chunk_tokens": chunk})
        monkeypatch.setattr(engine, "_slot_options", options)
    start(stages, name, CASES[name])
    assert_equal(run(stages, [name])[name], oracle.answer(name))


# -- a request's own ---------------------------------------------------------------------------------------


def test_sampled_codes_depend_on_the_seed_alone(stages):
    case = CASES["stops"]

    def sampled(name, seed):
        start(stages, name, case, seed=seed, talker_temperature=0.9)

    sampled("alone", 7)
    alone = run(stages, ["alone"])["alone"].codes.tolist()
    others = ["text", "image", "audio", "turns", "two_audios", "cut", "video"]
    for i, other in enumerate(others):
        start(stages, other, CASES[other], seed=i, talker_temperature=0.5 * (i % 3))
    sampled("again", 7)
    sampled("other seed", 8)
    results = run(stages, [*others, "again", "other seed"])
    assert results["again"].codes.tolist() == alone
    assert results["other seed"].codes.tolist() != alone
    start(stages, "greedy", case)
    assert run(stages, ["greedy"])["greedy"].codes.tolist() != alone


@pytest.mark.gpu
@GPU
def test_sampled_codes_on_a_gpu_are_those_of_a_cpu():
    on_cpu, on_gpu = (sampled_codes(stages_on(device)) for device in ("cpu", "cuda:0"))
    assert on_gpu == on_cpu


def sampled_codes(stages):
    """By name and seed; of three answers alone and of all of them at once, which are the same."""
    names = {f"{name} {seed}": (name, seed) for name in ("stops", "audio", "turns") for seed in (7, 1 << 40)}
    for key, (name, seed) in names.items():
        start(stages, key, CASES[name], seed=seed, talker_temperature=0.9)
    codes = {key: result.codes.tolist() for key, result in run(stages, names).items()}
    assert len({str(some) for some in codes.values()}) == len(names)
    return codes


def test_eight_speeches_at_once_never_mix(stages):
    """Chunks of eight streams in different phases, batched as they come."""
    names = [name for name in CASES if name not in ("video", "video_audio", "penalty", "long")]
    assert len(names) == 8
    buffers = {name: FrameBuffer(STREAMED if i % 2 else SCHEDULES["growing"]) for i, name in enumerate(names)}
    waiting = {}
    for name, buffer in buffers.items():
        frames = oracle.answer(name).codes.T.astype(np.int32)
        waiting[name] = [*buffer.push(frames), buffer.finish()]
    sounds = {name: [] for name in names}
    begun = set()
    for turn in range(1000):
        if not any(waiting.values()):
            break
        now = [name for i, name in enumerate(names) if waiting[name] and (turn + i) % 3]
        chunks = []
        for name in now:
            piece = waiting[name].pop(0)
            inputs = {"frames": piece.frames} if len(piece.frames) else {}
            chunks.append(Chunk(name, inputs, start=name not in begun, end=piece.last))
            begun.add(name)
        for chunk, answer in zip(chunks, stages.code2wav.run(chunks), strict=True):
            sounds[chunk.session].append(answer["pcm"])
    for name in names:
        sound, expected = np.concatenate(sounds[name]), oracle.answer(name).waveform
        assert sound.shape == expected.shape and np.abs(sound - expected).max() <= 1e-4
