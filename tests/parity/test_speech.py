"""The speech side of smoltalk against the package its voice comes from, and against a listener."""

from __future__ import annotations

import inspect
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hibari")
pytest.importorskip("onnx")
pytest.importorskip("faster_whisper")

import hibari.dsp  # noqa: E402
import hibari.tts  # noqa: E402
import onnx  # noqa: E402
import onnx.utils  # noqa: E402
import onnxruntime  # noqa: E402

from tritone.audio import encode_audio  # noqa: E402
from tritone.checkpoint import MANIFEST, checkpoint_dir, read_config  # noqa: E402
from tritone.engines.base import Chunk, Placement  # noqa: E402
from tritone.engines.whisper import WhisperEngine, WhisperOptions  # noqa: E402
from tritone.networks.pulse_synthesis import Pitch  # noqa: E402
from tritone.networks.spectral_decoder import Piece  # noqa: E402
from tritone.pipelines import smoltalk  # noqa: E402
from tritone.pipelines.smoltalk.code2wav import Code2Wav, Code2WavOptions  # noqa: E402
from tritone.pipelines.smoltalk.talker import Talker, TalkerOptions  # noqa: E402

CHECKPOINT = checkpoint_dir("smoltalk")
pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(not (CHECKPOINT / MANIFEST).is_file(), reason="run `python build/smoltalk.py`"),
]

# List 2 of the IEEE Recommended Practice for Speech Quality Measurements, 1969; a server says list 1.
HARVARD = (
    "The boy was there when the sun rose.",
    "A rod is used to catch pink salmon.",
    "The source of the huge river is the clear spring.",
    "Kick the ball straight and follow through.",
    "Help the woman get back to her feet.",
    "A pot of tea helps to pass the evening.",
    "Smoky fires lack flame and heat.",
    "The soft cushion broke the man's fall.",
    "The salt breeze came across from the sea.",
    "The girl at the booth sold fifty bonds.",
)
SENTENCE = "The quick brown fox jumps over the lazy dog and then it runs away into the dark forest."
SCHEDULES = {
    "single frames": [1] * 2000,
    "4 then 25": [4, *[25] * 100],
    "ragged": [3, 1, 40, 2, 17, 5, 60, 1, 1, 90] * 20,
    "one chunk": [10_000],
}
QUIET = -100.0  # log magnitude of no noise at all


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Nothing here may reach for the network."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the speech side reached for the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "0"))
        yield


@pytest.fixture(scope="module")
def talker(offline: None) -> Talker:
    return Talker(Placement(CHECKPOINT / "talker"), TalkerOptions())


@pytest.fixture(scope="module")
def code2wav(offline: None) -> Code2Wav:
    return Code2Wav(Placement(CHECKPOINT / "code2wav"), Code2WavOptions())


@pytest.fixture(scope="module")
def ears(offline: None) -> WhisperEngine:
    return WhisperEngine(Placement(CHECKPOINT / "ears"), WhisperOptions(beam_size=5))


@pytest.fixture(scope="module")
def original() -> hibari.Hibari:
    return hibari.Hibari()


@pytest.fixture(scope="module")
def sentence(original: hibari.Hibari) -> dict[str, np.ndarray]:
    """SENTENCE through the whole original graph (int8): latent and spectra [channels, F], f0 [F]."""
    ids = np.asarray([original.ids(original.phonemize(SENTENCE)[0])], np.int64)
    feed = {"ids": ids, "speed": np.ones(1, np.float32)}
    names = ("lh", "theta", "ln", "lr", "phi", "f0")
    values = dict(zip(names, original.sess.run(list(names), feed), strict=True))
    talker = onnxruntime.InferenceSession(CHECKPOINT / "talker" / "talker.onnx")
    values["latent"], f0 = talker.run(["latent", "f0"], feed)
    np.testing.assert_array_equal(f0, values["f0"])
    return {name: value[0] for name, value in values.items()}


def frames_of(sentence: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([sentence["latent"].T, sentence["f0"][:, None]], axis=1)


def spectra_of(code2wav: Code2Wav, latent: np.ndarray) -> np.ndarray:
    """[130, F] → [F, 5, bins] of one segment."""
    decoder = code2wav._decoder
    with torch.inference_mode():
        spectra, _ = decoder(
            [Piece(torch.from_numpy(latent.T.copy()), decoder.new_state(), segment_end=True)]
        )
    return spectra.numpy()


def say(talker: Talker, text: str, **settings: object) -> list[np.ndarray]:
    """The segments that the talker makes of `text`."""
    talker.add_request("say", {"text": text}, settings)
    talker.push("say", {}, last=True)
    deltas = []
    while talker.has_work:
        deltas += talker.step()
    assert deltas[-1].finish_reason == "stop"
    return [delta.outputs["frames"] for delta in deltas if delta.outputs]


def sound_of(code2wav: Code2Wav, segments: list[np.ndarray], seed: int = 1) -> np.ndarray:
    """Segments through code2wav in the chunks of a stream: 4 frames, then 25."""
    parts = []
    for number, frames in enumerate(segments):
        for begin, end in zip(
            [0, *range(4, len(frames), 25)], [*range(4, len(frames), 25), len(frames)], strict=True
        ):
            last = end == len(frames)
            chunk = Chunk(
                "sound",
                {"frames": frames[begin:end], "segment_end": last},
                start=not number and not begin,
                end=last and number == len(segments) - 1,
                settings={"seed": seed},
            )
            parts.append(code2wav.run([chunk])[0]["pcm"])
    return np.concatenate(parts)


def heard(ears: WhisperEngine, samples: np.ndarray, rate_hz: int) -> str:
    ears.add_request("heard", {"audio_input": samples, "audio_input_rate": rate_hz}, {})
    while True:
        for delta in ears.step():
            if delta.error:
                raise delta.error
            return delta.outputs["transcript"]


def test_the_pipeline_states_what_the_checkpoint_holds(talker, code2wav):
    assert talker.speakers == smoltalk.SPEAKERS
    assert talker.frame_rate_hz == code2wav.frame_rate_hz == smoltalk.FRAME_RATE_HZ
    assert code2wav.sample_rate_hz == smoltalk.SAMPLE_RATE_HZ
    assert code2wav.frame_width == smoltalk.FRAMES.dims[-1]


def test_signal_constants_are_the_voices(code2wav):
    config, defaults = code2wav._synthesis.config, inspect.signature(hibari.dsp.pulses).parameters
    assert (config.window_samples, config.hop_samples, config.sample_rate_hz) == (
        hibari.dsp.N_FFT,
        hibari.dsp.HOP,
        hibari.dsp.SR,
    )
    assert config.voiced_above_hz == defaults["vthresh"].default
    assert config.harmonics_below_hz == defaults["fmax"].default
    assert hibari.dsp.ex(np.float32(99)) == np.exp(np.float32(config.log_magnitude_ceiling))
    assert read_config(CHECKPOINT / "talker")["max_phonemes"] == hibari.tts.MAX_PHONEMES


@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_synthesis_equals_the_original(code2wav, sentence, sizes):
    """The same spectra and f0, noise off: streamed here, whole there."""
    synthesis, f0 = code2wav._synthesis, torch.from_numpy(sentence["f0"])
    quiet = {**sentence, "ln": np.full_like(sentence["ln"], QUIET)}
    parts = [quiet[name] for name in ("lh", "theta", "ln", "lr", "phi")]
    expected = hibari.dsp.synth(*[part.copy() for part in parts], sentence["f0"], np.random.default_rng(0))
    spectra = torch.from_numpy(np.stack(parts).transpose(2, 0, 1).copy())
    state, samples, begin, used = synthesis.new_state(0), [], 0, 0
    for size in sizes:
        end = min(len(f0), begin + size)
        last = end == len(f0)
        ready = end if last else max(used, end - synthesis.config.lookahead_frames)
        samples += synthesis([Pitch(f0[begin:end], state, last)], spectra[used:ready], [ready - used])
        begin, used = end, ready
        if last:
            break
    np.testing.assert_allclose(torch.cat(samples).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5])
def test_synthesis_of_the_shortest_segments_equals_the_original(code2wav, sentence, num_frames):
    middle = slice(200, 200 + num_frames)
    parts = [sentence[name][:, middle] for name in ("lh", "theta", "ln", "lr", "phi")]
    parts[2] = np.full_like(parts[2], QUIET)
    f0 = sentence["f0"][middle]
    expected = hibari.dsp.synth(*[part.copy() for part in parts], f0, np.random.default_rng(0))
    spectra = torch.from_numpy(np.stack(parts).transpose(2, 0, 1).copy())
    synthesis = code2wav._synthesis
    (samples,) = synthesis(
        [Pitch(torch.from_numpy(f0.copy()), synthesis.new_state(0), True)], spectra, [num_frames]
    )
    np.testing.assert_allclose(samples.numpy(), expected, atol=1e-6)


def test_the_decoder_is_as_close_to_the_int8_graph_as_that_is_to_itself(code2wav, original, sentence):
    """The original quantises activations by the loudest value of a call, so what else is in the call changes
    its spectra. Ours differ from it by no more than that: dequantised matrices lose nothing that 8 bits had.
    """
    graph = onnx.shape_inference.infer_shapes(onnx.load(original.model_path))
    seam = next(node.input[0] for node in graph.graph.node if node.name == "/dec_in/Conv")
    half = onnx.utils.Extractor(graph).extract_model([seam], ["lh", "theta", "ln", "lr", "phi"])
    int8 = onnxruntime.InferenceSession(half.SerializeToString())

    def quantised(latent: np.ndarray) -> np.ndarray:
        return np.stack([value[0] for value in int8.run(None, {seam: latent[None]})]).transpose(2, 0, 1)

    latent = sentence["latent"]
    cut, margin = slice(100, 300), code2wav._decoder.config.lookahead_frames
    reference = quantised(latent)
    ours = spectra_of(code2wav, latent)
    itself = quantised(latent[:, cut.start - margin : cut.stop + margin])[margin:-margin]
    deviation = np.sqrt(np.mean((ours - reference)[cut] ** 2, axis=(0, 2)))
    own_deviation = np.sqrt(np.mean((itself - reference[cut]) ** 2, axis=(0, 2)))
    assert (deviation < 0.1).all()
    assert (deviation < 1.25 * own_deviation).all(), (deviation, own_deviation)


@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_streamed_sound_equals_whole_sound(code2wav, sentence, sizes):
    frames, parts, begin = frames_of(sentence), [], 0
    whole = code2wav.run([Chunk("whole", {"frames": frames}, True, True, {"seed": 3})])[0]["pcm"]
    assert whole.shape == (len(frames) * code2wav.samples_per_frame,)
    for size in sizes:
        end = begin + size
        chunk = Chunk("cut", {"frames": frames[begin:end]}, not begin, end >= len(frames), {"seed": 3})
        parts.append(code2wav.run([chunk])[0]["pcm"])
        begin = end
        if chunk.end:
            break
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-4)


def test_double_precision_streams_exactly(code2wav, sentence):
    """What single precision leaves is rounding: in double precision the difference is gone."""
    from copy import deepcopy

    decoder = deepcopy(code2wav._decoder).double()
    latent = torch.from_numpy(sentence["latent"].T.copy()).double()
    with torch.inference_mode():
        whole, _ = decoder([Piece(latent, decoder.new_state(), segment_end=True)])
        state, parts = decoder.new_state(), []
        for begin in range(0, len(latent), 7):
            parts.append(decoder([Piece(latent[begin : begin + 7], state, begin + 7 >= len(latent))])[0])
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("text", ["😀", "聪明", "...", " \n ", "!?", "मैं", "🙂🙂 — 聪"], ids=ascii)
def test_what_cannot_be_spoken_ends_without_sound(talker, text):
    assert say(talker, text) == []


@pytest.mark.parametrize(
    "text",
    [
        "Hello 😀 world, 聪明!",
        "1" * 40,
        "On page ① see x² + y² = z².",
        "a" * 500,
        "**Bold**, `code` and [a link](https://a.b).",
        "# Heading\n\n- first\n- second\n",
        "\x00\x07 Bell.",
    ],
    ids=ascii,
)
def test_odd_texts_are_spoken(talker, text):
    segments = say(talker, text)
    assert segments and all(np.isfinite(frames).all() and len(frames) > 8 for frames in segments)


def test_numbers_that_take_long_to_say_are_cut_at_the_voices_limit(talker):
    text = "987,654,321,123 " * 20
    longest = read_config(CHECKPOINT / "talker")["max_phonemes"]
    assert all(len(part) <= longest for part in talker._voice.read(text))
    assert len(talker._voice.read(text)) > 1


def test_segments_begin_with_little_silence(talker, code2wav):
    """0.3 s of silence at the head of an answer is 0.3 s more to wait for it."""
    pcm = sound_of(code2wav, say(talker, "Hello there, my friend."))
    first_s = np.argmax(np.abs(pcm) > 0.01) / code2wav.sample_rate_hz
    assert first_s < 0.15


def words(text: str) -> list[str]:
    spellings = {"50": "fifty", "smokey": "smoky"}
    return [spellings.get(word, word) for word in re.sub(r"[^a-z0-9' ]", " ", text.lower()).split()]


def word_errors(said: list[str], heard: list[str]) -> int:
    """Least number of words inserted, left out or replaced."""
    costs = list(range(len(heard) + 1))
    for row, one in enumerate(said, 1):
        diagonal, costs[0] = costs[0], row
        for column, other in enumerate(heard, 1):
            diagonal, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, diagonal + (one != other)),
            )
    return costs[-1]


def test_word_errors():
    assert word_errors(list("abc"), list("abc")) == 0
    assert word_errors(list("abc"), list("axc")) == word_errors(list("abc"), list("ac")) == 1
    assert word_errors([], list("ab")) == word_errors(list("ab"), []) == 2


@pytest.mark.slow
def test_a_listener_understands_what_is_said(talker, code2wav, ears):
    errors = total = 0
    for sentence in HARVARD:
        pcm = sound_of(code2wav, say(talker, sentence))
        said = words(sentence)
        errors += word_errors(said, words(heard(ears, pcm, code2wav.sample_rate_hz)))
        total += len(said)
    assert errors / total <= 0.08, f"{errors} of {total} words"


def test_the_second_half_of_a_long_recording_is_heard(talker, code2wav, ears):
    """45 s: more than one window of the recogniser."""
    first = sound_of(code2wav, say(talker, "The weather was fine on every day of the long journey."))
    last = sound_of(code2wav, say(talker, "The secret word is elephant."))
    pause = np.zeros(45 * code2wav.sample_rate_hz - 10 * len(first) - len(last), np.float32)
    transcript = heard(ears, np.concatenate([*[first] * 10, pause, last]), code2wav.sample_rate_hz)
    assert transcript.lower().count("journey") == 10
    assert "elephant" in transcript.lower()


@pytest.mark.parametrize("encoding", ["wav", "flac", "opus"])
def test_encoded_speech_is_heard(talker, code2wav, ears, encoding):
    pcm = sound_of(code2wav, say(talker, "How old are you today?"))
    ears.add_request("a", {"audio": encode_audio(pcm, code2wav.sample_rate_hz, encoding)}, {})
    deltas = []
    while ears.has_work:
        deltas += ears.step()
    assert "how old are you" in deltas[-1].outputs["transcript"].lower()


@pytest.mark.parametrize("noise", [0.0, 0.05], ids=["silence", "noise"])
def test_silence_is_not_heard_as_words(ears, noise):
    samples = np.random.default_rng(0).normal(0, noise, 5 * 16000).astype(np.float32)
    with pytest.raises(Exception, match="no speech was recognised"):
        heard(ears, samples, 16000)


def test_a_checkpoint_folder_of_another_stage_is_refused():
    from tritone.errors import ConfigError

    with pytest.raises(ConfigError):
        Code2Wav(Placement(Path(CHECKPOINT / "talker")), Code2WavOptions())
