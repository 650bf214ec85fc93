"""The tensor contract of a pipeline model, version 1: what a client in any language sees.

A pipeline takes the inputs it has a use for (`Pipeline.accepts`); all pipelines share these declarations,
the outputs and the request parameters.
"""

from __future__ import annotations

from tritone.ports import Port

CONTRACT_VERSION = 1


def _optional(name: str, dtype: str, dims: tuple[int, ...], doc: str) -> Port:
    return Port(name, dtype, dims, doc, optional=True)


TEXT_INPUT = _optional("text_input", "STRING", (1,), "the user's prompt, one turn")
MESSAGES = _optional(
    "messages", "STRING", (1,), "JSON list of chat messages; media parts refer to the media tensors by order"
)
SAMPLING_PARAMETERS = _optional(
    "sampling_parameters",
    "STRING",
    (1,),
    "JSON: temperature, max_tokens, seed, stop …; per stage under its name",
)
IMAGE = _optional("image", "STRING", (-1,), "encoded files (PNG, JPEG), bytes or base64 text")
AUDIO = _optional("audio", "STRING", (-1,), "encoded files (WAV, FLAC, MP3, OGG), bytes or base64 text")
VIDEO = _optional("video", "STRING", (-1,), "encoded files (MP4), bytes or base64 text")
AUDIO_INPUT = _optional("audio_input", "FP32", (-1,), "raw mono samples in [-1, 1]")
AUDIO_INPUT_RATE = _optional("audio_input_rate", "INT32", (1,), "sample rate of audio_input in Hz")
MODALITIES = _optional(
    "modalities", "STRING", (1,), "comma-separated outputs; default: all the pipeline makes"
)
SPEAKER = _optional("speaker", "STRING", (1,), "voice, case-insensitive")
LANGUAGE = _optional("language", "STRING", (1,), "language of the speech")
INSTRUCTIONS = _optional("instructions", "STRING", (1,), "how to speak")
AUDIO_FORMAT = _optional("audio_format", "STRING", (1,), "s16 (default), f32, s16_base64, wav, flac or opus")
STREAM = _optional("stream", "BOOL", (1,), "false (default): one response with everything")
EXCLUDE_INPUT_IN_OUTPUT = _optional(
    "exclude_input_in_output", "BOOL", (1,), "accepted for compatibility; the prompt is never echoed"
)
RETURN_NUM_INPUT_TOKENS = _optional(
    "return_num_input_tokens", "BOOL", (1,), "add num_input_tokens to the answer"
)
RETURN_NUM_OUTPUT_TOKENS = _optional(
    "return_num_output_tokens", "BOOL", (1,), "add num_output_tokens to every text response"
)
RETURN_FINISH_REASON = _optional(
    "return_finish_reason", "BOOL", (1,), "accepted for compatibility; `done` always carries finish_reason"
)
RETURN_TIMINGS = _optional("return_timings", "BOOL", (1,), "add per-stage timings to info")
OP = _optional(
    "op", "STRING", (1,), "'ping' answers with the state of every stage; other values are reserved"
)
SESSION = _optional("session", "STRING", (1,), "reserved: live audio input")

CONTROL_INPUTS = (
    SAMPLING_PARAMETERS,
    MODALITIES,
    STREAM,
    EXCLUDE_INPUT_IN_OUTPUT,
    RETURN_NUM_INPUT_TOKENS,
    RETURN_NUM_OUTPUT_TOKENS,
    RETURN_FINISH_REASON,
    RETURN_TIMINGS,
    SESSION,
    OP,
)

TEXT_OUTPUT = Port(
    "text_output", "STRING", (-1,), "text delta of one or more tokens, '' if the response carries none"
)
EVENT = Port("event", "STRING", (1,), "text, audio or done; image, video and progress are reserved")
INDEX = Port("index", "UINT32", (1,), "counts the responses of a request from 0")
FINISH_REASON = Port("finish_reason", "STRING", (1,), "in done: JSON, modality to reason")
INFO = Port("info", "STRING", (1,), "in done: JSON with usage, seed and, if asked for, timings")
NUM_INPUT_TOKENS = Port("num_input_tokens", "UINT32", (1,), "tokens of the prompt")
NUM_OUTPUT_TOKENS = Port("num_output_tokens", "UINT32", (-1,), "tokens in this text delta")
AUDIO_OUTPUT = Port("audio_output", "INT16", (-1,), "mono PCM16 samples")
AUDIO_F32 = Port("audio_f32", "FP32", (-1,), "mono samples in [-1, 1], instead of audio_output")
AUDIO_ENCODED = Port(
    "audio_encoded",
    "STRING",
    (1,),
    "encoded samples, instead of audio_output; the chunks concatenate to one file",
)
SAMPLE_RATE = Port("sample_rate", "INT32", (1,), "sample rate of the audio in Hz")
SAMPLE_OFFSET = Port("sample_offset", "INT64", (1,), "position of the first sample in the whole answer")

COMMON_OUTPUTS = (TEXT_OUTPUT, EVENT, INDEX, FINISH_REASON, INFO, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS)
AUDIO_DATA_OUTPUTS = (AUDIO_OUTPUT, AUDIO_F32, AUDIO_ENCODED)  # one of them, as audio_format says
AUDIO_OUTPUTS = (*AUDIO_DATA_OUTPUTS, SAMPLE_RATE, SAMPLE_OFFSET)

AUDIO_FORMATS = ("s16", "f32", "s16_base64", "wav", "flac", "opus")

PARAMETERS = {
    "deadline_ms": int,
    "seed": int,
    "priority": int,  # Triton's own, which it keeps to itself; without effect here
    "queue_priority": int,  # 0 to 100: among those that wait for a turn, lower is sooner; default 0
    "traceparent": str,  # W3C Trace Context of the caller's span; one that is not valid is ignored
    "tracestate": str,
    "initial_codec_chunk_frames": int,
    "codec_chunk_frames": int,
    "codec_chunk_growth": float,
    "use_audio_in_video": bool,
}
"""Request parameters and their types. Triton knows no float: such a one is sent as int or numeric string."""

FINISH_REASONS = {
    "stop": "the model ended it, or a stop string",
    "length": "a limit was reached; of audio also: it speaks a text that was cut",
    "deadline": "the request's deadline passed",
    "repetition": "the model repeated itself and was stopped",
    "cancelled": "reserved: a part of an answer was told to stop",
}
"""Why a modality ends, and what each word means."""

# No STRING: one with a broken length, from a stranger, would fail all requests of its batch inside Triton.
CONTROL = Port("control", "UINT8", (-1,), "what the orchestrator asks of the stage, JSON text (internal)")
REPLY = Port("reply", "STRING", (1,), "what the stage answers, JSON (internal)")
