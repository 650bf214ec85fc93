"""A minimal second pipeline: three stages without weights, whose output says exactly what came in.

    messages ─► writer ──text──► client
                   └────text──► singer ──frames──► wave ──pcm──► client

The writer repeats the last user message word by word. The singer gives one frame a character, its code
point; a word is a segment. The wave stage turns a frame into SAMPLES_PER_FRAME equal samples and adds the
number of the frame in the answer, so that loss, reordering and cross-talk change the sound.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import numpy as np

from tritone import contract as c
from tritone.engines.base import BatchEngine, Delta, Engine
from tritone.errors import InvalidRequest, TritoneError
from tritone.pipeline import Batching, Checkpoint, Edge, Execution, Facts, Pipeline, Stage, StageCall
from tritone.ports import Port
from tritone.sampling import Sampling

SAMPLE_RATE_HZ = 8000
SAMPLES_PER_FRAME = 80

MESSAGES = Port("messages", "STRING", (1,), "the conversation, JSON")
TEXT = Port("text", "STRING", (1,), "text delta")
FRAMES = Port("frames", "FP32", (-1, 1), "one code point a frame")
SEGMENT_END = Port("segment_end", "BOOL", (1,), "the frames end a word")
PCM = Port("pcm", "FP32", (-1,), "mono samples")


def expected_pcm(text: str) -> np.ndarray:
    """The sound of a whole answer: float32 [n] in [0, 1)."""
    codes = np.array([ord(character) for character in text], np.float32) / 2**21
    codes += np.arange(len(codes), dtype=np.float32) / 2**12
    return np.repeat(codes, SAMPLES_PER_FRAME).astype(np.float32)


@dataclass(frozen=True)
class Pace:
    step_s: float = 0.0  # how long one step takes
    max_sessions: int = 64
    fail_on: str = ""  # a word that makes the step raise


class Writer(Engine):
    Options = Pace

    def __init__(self, placement, options):
        self._options = options
        self._words = {}

    def add_request(self, session, inputs, settings):
        last = json.loads(inputs["messages"])[-1]
        text = "".join(part.get("text", "") for part in last["content"])
        if text.startswith("refuse"):
            raise InvalidRequest("text_input starts with 'refuse'", "start with another word")
        words = [word + " " for word in text.split(" ")]
        self._words[session] = words[: settings["sampling"]["max_tokens"]]

    def push(self, session, inputs, last):
        pass

    def step(self):
        time.sleep(self._options.step_s)
        deltas = []
        for session, words in list(self._words.items()):
            word = words.pop(0)
            if word.strip() == self._options.fail_on and word.strip():
                raise RuntimeError("the fault that was asked for")
            end = not words
            if end:
                del self._words[session]
            deltas.append(
                Delta(
                    session, {"text": word}, "stop" if end else None, {"completion_tokens": 1} if end else {}
                )
            )
        return deltas

    @property
    def has_work(self):
        return bool(self._words)

    def abort(self, session):
        self._words.pop(session, None)

    def stats(self):
        return {"active": len(self._words)}


class Singer(Engine):
    Options = Pace

    def __init__(self, placement, options):
        self._queues = {}  # session to (words waiting, input ended)

    def add_request(self, session, inputs, settings):
        self._queues[session] = [[], False]

    def push(self, session, inputs, last):
        if session in self._queues:
            if "text" in inputs:
                self._queues[session][0].append(inputs["text"])
            self._queues[session][1] = last

    def step(self):
        deltas = []
        for session, (words, ended) in list(self._queues.items()):
            for word in words:
                frames = np.array([[ord(character)] for character in word], np.float32)
                deltas.append(Delta(session, {"frames": frames, "segment_end": True}))
            words.clear()
            if ended:
                del self._queues[session]
                deltas.append(Delta(session, {}, "stop"))
        return deltas

    @property
    def has_work(self):
        return any(words or ended for words, ended in self._queues.values())

    def abort(self, session):
        self._queues.pop(session, None)

    def stats(self):
        return {"active": len(self._queues)}


class Wave(BatchEngine):
    Options = Pace

    def __init__(self, placement, options):
        self._frames_seen = {}

    def run(self, chunks):
        results = []
        for chunk in chunks:
            if chunk.start:
                self._frames_seen[chunk.session] = 0
            if chunk.session not in self._frames_seen:
                results.append(TritoneError(f"stream {chunk.session} has no state"))
                continue
            frames = chunk.inputs.get("frames", np.zeros((0, 1), np.float32))
            seen = self._frames_seen[chunk.session]
            self._frames_seen[chunk.session] += len(frames)
            values = frames[:, 0] / 2**21 + (np.arange(len(frames), dtype=np.float32) + seen) / 2**12
            results.append({"pcm": np.repeat(values, SAMPLES_PER_FRAME).astype(np.float32)})
            if chunk.end:
                del self._frames_seen[chunk.session]
        return results

    def abort(self, session):
        self._frames_seen.pop(session, None)

    def stats(self):
        return {"active": len(self._frames_seen)}


def plan(request):
    calls = {
        "writer": StageCall(
            {"messages": request.messages_json}, {"sampling": request.sampling["writer"].as_dict()}
        )
    }
    if "audio" in request.modalities:
        calls["singer"] = StageCall()
        calls["wave"] = StageCall(settings={"seed": request.seed})
    return calls


PIPELINE = Pipeline(
    name="echo",
    doc="repeats what it hears",
    stages=(
        Stage(
            "writer", Execution.LLM_AR, {"python": "echo:Writer"}, (MESSAGES,), (TEXT,), sampling=Sampling()
        ),
        Stage("singer", Execution.LLM_AR, {"python": "echo:Singer"}, (TEXT,), (FRAMES, SEGMENT_END)),
        Stage(
            "wave",
            Execution.LLM_GENERATION,
            {"python": "echo:Wave"},
            (FRAMES, SEGMENT_END),
            (PCM,),
            batching=Batching.TRITON,
        ),
    ),
    edges=(
        Edge("writer.text", "singer.text"),
        Edge("singer.frames", "wave.frames"),
        Edge("singer.segment_end", "wave.segment_end"),
    ),
    finals={"text": "writer.text", "audio": "wave.pcm"},
    accepts=(c.TEXT_INPUT, c.MESSAGES),
    plan=plan,
    facts=lambda _: Facts(sample_rate_hz=SAMPLE_RATE_HZ),
    checkpoint=Checkpoint.NONE,
)
