"""smoltalk: the embedded default. Text or speech in, text and speech out, on two CPU cores.

    audio ─► ears ──transcript──► thinker ──text──► client
    messages ────────────────────────┘   └──text──► talker ──frames──► code2wav ──pcm──► client

    ears      Whisper tiny.en           the whole recording at once
    thinker   SmolLM2-135M-Instruct     token by token
    talker    acoustic half of hibari   a clause at a time, while the thinker writes on
    code2wav  decoder half of hibari    80 frames/s in, 24 kHz out, streaming

A conversation that ends with the assistant's words is spoken as it is, without ears and thinker.
"""

from __future__ import annotations

from pathlib import Path

from tritone import contract as c
from tritone.engines.base import Values
from tritone.errors import InvalidRequest, suggestion
from tritone.pipeline import Batching, Edge, Execution, Facts, Pipeline, Plan, Stage, StageCall
from tritone.ports import Port
from tritone.request import Request
from tritone.sampling import Sampling

SPEAKERS = ("heart",)
SAMPLE_RATE_HZ = 24000
FRAME_RATE_HZ = 80.0

AUDIO_FILES = Port("audio", "STRING", (-1,), "encoded recordings", optional=True)
SAMPLES = Port("audio_input", "FP32", (-1,), "raw mono samples in [-1, 1]", optional=True)
SAMPLES_RATE = Port("audio_input_rate", "INT32", (1,), "their rate in Hz", optional=True)
TRANSCRIPT = Port("transcript", "STRING", (1,), "what one recording says")
MESSAGES = Port("messages", "STRING", (1,), "the conversation, JSON")
TEXT = Port("text", "STRING", (1,), "text delta, whole characters")
NUM_TOKENS = Port("num_tokens", "INT32", (1,), "tokens behind the text delta")
FRAMES = Port("frames", "FP32", (-1, 131), "acoustic frames at 80 Hz: 130 latent values, then F0 in Hz")
SEGMENT_END = Port("segment_end", "BOOL", (1,), "the frames end a clause")
PCM = Port("pcm", "FP32", (-1,), "mono samples in [-1, 1] at 24 kHz")


def plan(request: Request) -> Plan:
    """ears only for recordings, thinker unless the words are given, the speech side only for audio."""
    calls: dict[str, StageCall] = {}
    spoken = request.ends_with_assistant
    if spoken:
        if "audio" not in request.modalities:
            raise InvalidRequest(
                "the conversation ends with the assistant's words but modalities leaves audio out",
                "ask for audio, or end with a user message",
            )
    else:
        calls["thinker"] = StageCall(
            {"messages": request.messages_json}, {"sampling": request.sampling["thinker"].as_dict()}
        )
        if request.parts("audio"):
            calls["ears"] = StageCall(_recordings(request), {"max_audio_s": request.limits.audio_s})
    if "audio" in request.modalities:
        text = {"text": request.text_of_last()} if spoken else {}
        calls["talker"] = StageCall(text, {"speaker": _speaker(request.speaker)})
        calls["code2wav"] = StageCall(settings={"seed": request.seed})
    return calls


def _recordings(request: Request) -> Values:
    if request.audio_input is not None:
        return {"audio_input": request.audio_input, "audio_input_rate": request.audio_input_rate_hz}
    return {"audio": request.media["audio"]}


def _speaker(name: str | None) -> str:
    if name is None:
        return SPEAKERS[0]
    if name.lower() not in SPEAKERS:
        raise InvalidRequest(f"speaker is '{name}'", suggestion(name.lower(), SPEAKERS))
    return name.lower()


def facts(_: Path) -> Facts:
    """The weights are pinned by version and hash, so their facts are too (tests/parity holds them to it)."""
    return Facts(sample_rate_hz=SAMPLE_RATE_HZ, speakers=SPEAKERS)


PIPELINE = Pipeline(
    name="smoltalk",
    doc="SmolLM2-135M-Instruct that listens with Whisper tiny.en and speaks with hibari",
    stages=(
        Stage(
            "ears",
            Execution.LLM_GENERATION,
            {"whisper": "tritone.engines.whisper:WhisperEngine"},
            inputs=(AUDIO_FILES, SAMPLES, SAMPLES_RATE),
            outputs=(TRANSCRIPT,),
        ),
        Stage(
            "thinker",
            Execution.LLM_AR,
            {"torch": "tritone.engines.torch_ar:TorchEngine"},
            inputs=(MESSAGES, TRANSCRIPT),
            outputs=(TEXT, NUM_TOKENS),
            sampling=Sampling(temperature=0.0, repetition_penalty=1.05, max_tokens=160),
        ),
        Stage(
            "talker",
            Execution.LLM_GENERATION,
            {"hibari": "tritone.pipelines.smoltalk.talker:Talker"},
            inputs=(TEXT,),
            outputs=(FRAMES, SEGMENT_END),
        ),
        Stage(
            "code2wav",
            Execution.LLM_GENERATION,
            {"torch": "tritone.pipelines.smoltalk.code2wav:Code2Wav"},
            inputs=(FRAMES, SEGMENT_END),
            outputs=(PCM,),
            batching=Batching.TRITON,
        ),
    ),
    edges=(
        Edge("ears.transcript", "thinker.transcript"),
        Edge("thinker.text", "talker.text"),
        Edge("talker.frames", "code2wav.frames"),
        Edge("talker.segment_end", "code2wav.segment_end"),
    ),
    finals={"text": "thinker.text", "audio": "code2wav.pcm"},
    accepts=(c.TEXT_INPUT, c.MESSAGES, c.AUDIO, c.AUDIO_INPUT, c.AUDIO_INPUT_RATE, c.SPEAKER),
    plan=plan,
    facts=facts,
)
