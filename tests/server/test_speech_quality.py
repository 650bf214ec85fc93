"""Ten sentences through `say` on a server, written down again by Whisper."""

import asyncio
import re

import numpy as np
import pytest

pytestmark = [pytest.mark.server, pytest.mark.weights]

# Harvard sentences, list 1 (IEEE Recommended Practice for Speech Quality Measurements, 1969).
SENTENCES = [
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It's easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
]
MAX_WORD_ERROR_RATE = 0.08


def words(text):
    return re.sub(r"[^a-z0-9' ]", " ", text.lower().replace("4 ", "four ")).split()


def word_errors(reference, heard):
    """Levenshtein distance in words."""
    row = np.arange(len(heard) + 1)
    for i, word in enumerate(reference, 1):
        previous, row = row, np.empty_like(row)
        row[0] = i
        for j, other in enumerate(heard, 1):
            row[j] = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (word != other))
    return int(row[-1])


def test_word_errors_counts_words():
    assert word_errors(words("a b c"), words("a x c d")) == 2
    assert word_errors(words("a b c"), words("A, b c!")) == 0


async def test_speech_is_intelligible(serve):
    from tritone.checkpoint import checkpoint_dir
    from tritone.engines.base import Placement
    from tritone.engines.whisper import WhisperEngine

    server = serve("smoltalk")
    ears = WhisperEngine(Placement(checkpoint_dir("smoltalk") / "ears"), WhisperEngine.Options(beam_size=5))
    async with server.client("smoltalk") as client:
        answers = await asyncio.gather(
            *(
                client.ask(messages=[{"role": "assistant", "content": sentence}], modalities="audio", seed=1)
                for sentence in SENTENCES
            )
        )
    errors = 0
    for number, (sentence, said) in enumerate(zip(SENTENCES, answers, strict=True)):
        samples = said.samples.astype(np.float32) / 32768
        ears.add_request(str(number), {"audio_input": samples, "audio_input_rate": said.sample_rate_hz}, {})
        ears.push(str(number), {}, last=True)
        heard = ""
        while ears.has_work:
            heard += "".join(str(delta.outputs.get("transcript", "")) for delta in ears.step())
        errors += word_errors(words(sentence), words(heard))
    total = sum(len(words(sentence)) for sentence in SENTENCES)
    assert errors / total <= MAX_WORD_ERROR_RATE, f"{errors} of {total} words"
