"""Qwen3-Omni: text, speech, pictures and video in, text and speech out.

    messages, media ─► thinker ──text─────────────────────────────────────────────────► client
                          ├─ prompt_ids, prompt_positions, media_rows ─┐                   ▲ pcm
                          └─ token_ids, as they are drawn ─────────────┴─► talker ─frames─► code2wav

The talker reads its prompt as soon as the thinker's is known, begins to speak with the thinker's first token,
and needs token k + 2 for frame k + 1: text and speech are made at the same time.

Source: Qwen3-Omni technical report (arXiv 2509.17765); reference: `Qwen3OmniMoeForConditionalGeneration` in
`transformers`, whose greedy answers this pipeline gives token by token and code by code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tritone import contract as c
from tritone.engines.base import Value
from tritone.errors import InvalidRequest, Unsupported, suggestion
from tritone.pipeline import Batching, Checkpoint, Edge, Execution, Facts, Pipeline, Plan, Stage, StageCall
from tritone.pipelines.qwen3_omni.config import OmniConfig
from tritone.ports import Port
from tritone.request import Request
from tritone.sampling import Sampling

DEFAULT_SPEAKER = "ethan"  # if the checkpoint has it; else its first

MESSAGES = Port("messages", "STRING", (1,), "the conversation, JSON")
IMAGES = Port("image", "STRING", (-1,), "encoded pictures", optional=True)
AUDIO_FILES = Port("audio", "STRING", (-1,), "encoded recordings", optional=True)
VIDEOS = Port("video", "STRING", (-1,), "encoded videos", optional=True)
SAMPLES = Port("audio_input", "FP32", (-1,), "raw mono samples in [-1, 1]", optional=True)
SAMPLES_RATE = Port("audio_input_rate", "INT32", (1,), "their rate in Hz", optional=True)
TEXT = Port("text", "STRING", (1,), "text delta, whole characters")
NUM_TOKENS = Port("num_tokens", "INT32", (1,), "tokens behind the text delta")
PROMPT_IDS = Port("prompt_ids", "INT32", (-1,), "token ids of the user's turns")
PROMPT_POSITIONS = Port("prompt_positions", "FP32", (3, -1), "time, height and width of the talker's prompt")
MEDIA_ROWS = Port("media_rows", "FP32", (-1, -1), "thinker's hidden state at each media token of prompt_ids")
TOKEN_IDS = Port("token_ids", "INT32", (-1,), "tokens to speak; the first three begin the assistant's turn")
FRAMES = Port("frames", "INT32", (-1, -1), "codec frames at 12.5 Hz, a code for each codebook")
PCM = Port("pcm", "FP32", (-1,), "mono samples in [-1, 1]")


def plan(request: Request) -> Plan:
    """thinker always, the speech side only for audio."""
    if request.ends_with_assistant:
        raise Unsupported(
            "the conversation ends with the assistant's words, and this pipeline speaks only its own",
            "end with a user message",
        )
    speaks = "audio" in request.modalities
    calls = {"thinker": StageCall(_thinker_inputs(request), _thinker_settings(request, speaks))}
    if speaks:
        calls["talker"] = StageCall(
            settings={"sampling": request.sampling["talker"].as_dict(), "speaker": _speaker_name(request)}
        )
        calls["code2wav"] = StageCall()
    return calls


def _thinker_inputs(request: Request) -> dict[str, Value]:
    inputs: dict[str, Value] = {"messages": request.messages_json, **request.media}
    if request.audio_input is not None:
        inputs["audio_input"] = request.audio_input
        inputs["audio_input_rate"] = request.audio_input_rate_hz
    return inputs


def _thinker_settings(request: Request, speaks: bool) -> dict[str, Any]:
    limits = request.limits
    return {
        "sampling": request.sampling["thinker"].as_dict(),
        "speaks": speaks,
        "use_audio_in_video": request.use_audio_in_video,
        "limits": {
            "audio_s": limits.audio_s,
            "image_pixels": limits.image_pixels,
            "video_s": limits.video_s,
        },
    }


def _speaker_name(request: Request) -> str | None:
    return request.speaker.lower() if request.speaker else None


def check_speaker(name: str | None, speakers: tuple[str, ...]) -> str:
    """The speaker to use; InvalidRequest listing the known ones."""
    if name is None:
        return DEFAULT_SPEAKER if DEFAULT_SPEAKER in speakers else speakers[0]
    if name not in speakers:
        raise InvalidRequest(f"speaker is '{name}'", suggestion(name, speakers))
    return name


def facts(checkpoint: Path) -> Facts:
    config = OmniConfig.read(checkpoint)
    return Facts(sample_rate_hz=config.sample_rate_hz, speakers=tuple(sorted(config.speakers)))


PIPELINE = Pipeline(
    name="qwen3_omni",
    doc="Qwen3-Omni: sees, hears, writes and speaks",
    stages=(
        Stage(
            "thinker",
            Execution.LLM_AR,
            {
                "torch": "tritone.pipelines.qwen3_omni.thinker:Thinker",
                "vllm": "tritone.pipelines.qwen3_omni.vllm_thinker:VllmThinker",
            },
            inputs=(MESSAGES, IMAGES, AUDIO_FILES, VIDEOS, SAMPLES, SAMPLES_RATE),
            outputs=(TEXT, NUM_TOKENS, PROMPT_IDS, PROMPT_POSITIONS, MEDIA_ROWS, TOKEN_IDS),
            sampling=Sampling(temperature=0.0, max_tokens=1024),
        ),
        Stage(
            "talker",
            Execution.LLM_AR,
            {"torch": "tritone.pipelines.qwen3_omni.talker:Talker"},
            inputs=(PROMPT_IDS, PROMPT_POSITIONS, MEDIA_ROWS, TOKEN_IDS),
            outputs=(FRAMES,),
            sampling=Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=4096),
            urgency=2,  # every frame of every listener waits for it; the thinker is ahead of its readers
        ),
        Stage(
            "code2wav",
            Execution.LLM_GENERATION,
            {
                "torch": "tritone.pipelines.qwen3_omni.code2wav:Code2Wav",
                "onnx": "tritone.pipelines.qwen3_omni.code2wav_onnx:OnnxCode2Wav",
                "tensorrt": "tritone.pipelines.qwen3_omni.code2wav_tensorrt:TensorrtCode2Wav",
            },
            inputs=(FRAMES,),
            outputs=(PCM,),
            batching=Batching.TRITON,
            urgency=1,
        ),
    ),
    edges=(
        Edge("thinker.prompt_ids", "talker.prompt_ids"),
        Edge("thinker.prompt_positions", "talker.prompt_positions"),
        Edge("thinker.media_rows", "talker.media_rows"),
        Edge("thinker.token_ids", "talker.token_ids"),
        Edge("talker.frames", "code2wav.frames"),
    ),
    finals={"text": "thinker.text", "audio": "code2wav.pcm"},
    accepts=(
        c.TEXT_INPUT,
        c.MESSAGES,
        c.IMAGE,
        c.AUDIO,
        c.AUDIO_INPUT,
        c.AUDIO_INPUT_RATE,
        c.VIDEO,
        c.SPEAKER,
    ),
    plan=plan,
    facts=facts,
    checkpoint=Checkpoint.RELEASED,
)
