"""fake: stages without weights that do what the prompt orders, well or badly. For tests of deployments.

    prompt ─► writer ──text──► client
                 └──word, payload──► singer ──frames──► wave ──pcm──► client

    writer   a word each step: counted ones, or those of the prompt
    singer   the codec frames of a word: the request's voice, and a number a frame
    wave     sound in which both are heard, 20 ms a frame; `signal.decode` reads them back

A frame is numbered by the word that it came from, so that what is lost or swapped between any two stages is
heard as well. How fast, how much, and what goes wrong where: see `orders`.
"""

from __future__ import annotations

from tritone import contract as c
from tritone.pipeline import Batching, Checkpoint, Edge, Execution, Facts, Pipeline, Plan, Stage, StageCall
from tritone.pipelines.fake.orders import Orders
from tritone.pipelines.fake.signal import SAMPLE_RATE_HZ, voice_of
from tritone.ports import Port
from tritone.request import Request
from tritone.sampling import Sampling

SAID = Port("said", "STRING", (1,), "the words to say, '' for counted ones")
TEXT = Port("text", "STRING", (1,), "one word")
NUM_TOKENS = Port("num_tokens", "INT32", (1,), "words in the text delta")
WORD = Port("word", "INT32", (2,), "voice of the request and number of the word")
PAYLOAD = Port("payload", "UINT8", (-1,), "ballast, as large as the prompt orders")
FRAMES = Port("frames", "INT32", (-1, 2), "voice and number of each codec frame, 50 a second")
PCM = Port("pcm", "FP32", (-1,), "mono samples in [-1, 1] at 16 kHz")


def plan(request: Request) -> Plan:
    """All stages for audio, the writer alone for text. Raises InvalidRequest for orders that are unknown."""
    orders = Orders.read(request.text_of_last())
    voice = voice_of(request.seed)
    writer = {
        **orders.settings("writer"),
        "voice": voice,
        "words": orders.words,
        "payload_bytes": orders.payload_bytes,
        "has_faults": bool(orders.faults),
        "sampling": request.sampling["writer"].as_dict(),
    }
    calls = {"writer": StageCall({"said": " ".join(orders.said)}, writer)}
    if "audio" in request.modalities:
        singer = {**orders.settings("singer"), "frames_per_word": orders.frames_per_word}
        calls["singer"] = StageCall(settings={**singer, "payload_bytes": orders.payload_bytes})
        calls["wave"] = StageCall(settings=orders.settings("wave"))
    return calls


PIPELINE = Pipeline(
    name="fake",
    doc="says what it is told, in sound that can be checked; fails on demand",
    stages=(
        Stage(
            "writer",
            Execution.LLM_AR,
            {"numpy": "tritone.pipelines.fake.engines:Writer"},
            inputs=(SAID,),
            outputs=(TEXT, NUM_TOKENS, WORD, PAYLOAD),
            sampling=Sampling(max_tokens=1 << 20),
        ),
        Stage(
            "singer",
            Execution.LLM_AR,
            {"numpy": "tritone.pipelines.fake.engines:Singer"},
            inputs=(WORD, PAYLOAD),
            outputs=(FRAMES,),
        ),
        Stage(
            "wave",
            Execution.LLM_GENERATION,
            {"numpy": "tritone.pipelines.fake.wave:Wave"},
            inputs=(FRAMES,),
            outputs=(PCM,),
            batching=Batching.TRITON,
        ),
    ),
    edges=(
        Edge("writer.word", "singer.word"),
        Edge("writer.payload", "singer.payload"),
        Edge("singer.frames", "wave.frames"),
    ),
    finals={"text": "writer.text", "audio": "wave.pcm"},
    accepts=(c.TEXT_INPUT, c.MESSAGES),
    plan=plan,
    facts=lambda _: Facts(sample_rate_hz=SAMPLE_RATE_HZ),
    checkpoint=Checkpoint.NONE,
)
