"""The streaming codec decoder against the whole decode of its reference in transformers."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference_module  # noqa: E402
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (  # noqa: E402
    Qwen3OmniMoeCode2WavConfig,
)

from tritone.errors import ConfigError  # noqa: E402
from tritone.networks import waveform_decoder  # noqa: E402
from tritone.networks.waveform_decoder import Piece, WaveformConfig, WaveformDecoder  # noqa: E402
from tritone.networks.weights import Weights  # noqa: E402

TINY = {
    "codebook_size": 16,
    "num_quantizers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_bias": True,
    "decoder_dim": 16,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FRAMES = 180  # the window of 72 has slid far
SCHEDULES = {
    "single frames": [1],
    "4 then 25": [4, *[25] * 99],
    "ragged": [3, 1, 40, 2, 17, 5, 130, 60, 1, 1],
    "empty calls": [0, 30, 0, 0, 70, 0],
    "hundreds": [101],
    "one chunk": [FRAMES],
}


class DoubleNorm(torch.nn.Module):
    """The reference's RMSNorm, which computes in float32 whatever its input is."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class DoubleRotation(torch.nn.Module):
    """The reference's rotary angles, of the same frequencies, not rounded to float32."""

    def __init__(self, rotation):
        super().__init__()
        self.frequencies = rotation.inv_freq.double()

    def forward(self, _, positions):
        angles = torch.cat([positions[..., None].double() * self.frequencies] * 2, dim=-1)
        return angles.cos(), angles.sin()


def make_reference(**changes):
    """A reference with random weights that neither vanish nor drive samples to full scale."""
    model = reference_module.Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**{**TINY, **changes})).eval()
    generator = torch.Generator().manual_seed(17)

    def noise(weight, mean, deviation):
        weight.copy_(mean + deviation * torch.randn(weight.shape, generator=generator))

    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith(("alpha", "beta")):
                noise(weight, 0, 0.2)
            elif "norm" in name and name.endswith("weight"):
                noise(weight, 1, 0.1)
            elif name.endswith(("scale", "gamma")):
                noise(weight, 0.5, 0.1)
            elif weight.dim() == 1:
                noise(weight, 0, 0.1)
            elif "embedding" in name:
                noise(weight, 0, 1)
            else:
                # Below unit gain: what float32 rounds off is then not blown up from layer to layer.
                noise(weight, 0, 0.7 * weight[0].numel() ** -0.5)
        model.decoder[-1].conv.weight *= 1e-4
        model.decoder[-1].conv.weight *= 0.1 / model(random_codes(30)[None].mT).std()
    return model


def in_double(model):
    model.double()
    transformer = model.pre_transformer
    transformer.rotary_emb = DoubleRotation(transformer.rotary_emb)
    for layer in transformer.layers:
        layer.input_layernorm = DoubleNorm(layer.input_layernorm)
        layer.post_attention_layernorm = DoubleNorm(layer.post_attention_layernorm)
    transformer.norm = DoubleNorm(transformer.norm)
    return model


def make_decoder(model, folder, dtype=torch.float64, **changes):
    save_file(
        {f"code2wav.{k}": v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors"
    )
    config = dataclasses.replace(WaveformConfig.from_hf(model.config.to_dict()), **changes)
    return WaveformDecoder(config, Weights(folder), dtype=dtype)


def random_codes(num_frames, seed=0, config=TINY):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_frames, config["num_quantizers"])
    return torch.randint(0, config["codebook_size"], shape, generator=generator)


def whole(model, codes):
    with torch.no_grad():
        samples = model(codes[None].mT)[0, 0]
    assert samples.abs().max() < 1  # nothing hides in the clamp
    return samples


def pieces_of(codes, sizes):
    begin = 0
    for size in itertools.cycle(sizes):
        if begin >= len(codes):
            return
        yield codes[begin : begin + size]
        begin += size


def streamed(decoder, codes, sizes):
    state = decoder.new_state()
    return torch.cat([decoder.forward([Piece(part, state)])[0] for part in pieces_of(codes, sizes)])


def assert_close(samples, expected, tolerance=1e-10):
    torch.testing.assert_close(samples, expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference():
    return in_double(make_reference())


@pytest.fixture(scope="module")
def decoder(reference, tmp_path_factory):
    return make_decoder(reference, tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def full(reference):
    return whole(reference, random_codes(FRAMES))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A decoder in float32 and what its reference makes of all frames."""
    model = make_reference()
    decoder = make_decoder(model, tmp_path_factory.mktemp("single"), torch.float32)
    return decoder, whole(model, random_codes(FRAMES))


@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_streamed_equals_whole(decoder, full, sizes):
    assert_close(streamed(decoder, random_codes(FRAMES), sizes), full)


@pytest.mark.parametrize("sizes", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_streamed_equals_the_untouched_reference_in_single_precision(single, sizes):
    decoder, full = single
    samples = streamed(decoder, random_codes(FRAMES), sizes)
    assert samples.dtype == torch.float32
    assert_close(samples, full, 1e-5)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 7])
def test_short_streams_equal_the_whole(decoder, reference, num_frames):
    codes = random_codes(num_frames, seed=9)
    for size in (1, num_frames):
        assert_close(streamed(decoder, codes, [size]), whole(reference, codes))


def test_lengths_are_the_references(decoder, full):
    assert (decoder.samples_per_frame, decoder.missing_samples) == (1920, 555)
    assert len(full) == FRAMES * 1920 - 555
    state = decoder.new_state()
    lengths = [len(decoder.forward([Piece(random_codes(n), state)])[0]) for n in (1, 0, 4, 25)]
    assert lengths == [1365, 0, 7680, 48000]


def test_116_frames_lose_nothing(decoder, reference):
    codes, state = random_codes(116, seed=3), decoder.new_state()
    parts = [decoder.forward([Piece(p, state)])[0] for p in codes.split([4, 25, 25, 25, 25, 12])]
    assert [len(part) for part in parts] == [7125, 48000, 48000, 48000, 48000, 23040]
    assert_close(torch.cat(parts), whole(reference, codes))


@pytest.mark.parametrize(
    ("rates", "ratios"), [([8, 5, 4, 3], []), ([2, 2, 2], []), ([3], [2]), ([5, 4], [3])], ids=str
)
@pytest.mark.parametrize("sizes", [[1], [2, 1, 30]], ids=str)
def test_leads_longer_than_a_chunk(tmp_path, rates, ratios, sizes):
    """With these rates the first frames alone may give no samples at all."""
    model = in_double(make_reference(upsample_rates=rates, upsampling_ratios=ratios))
    decoder = make_decoder(model, tmp_path)
    codes = random_codes(40)
    assert_close(streamed(decoder, codes, sizes), whole(model, codes))


def run_together(decoder, lengths, rng, busy, sizes):
    """Streams of random codes, each with its own chunk sizes, in the batches that chance makes."""
    codes = [random_codes(length, seed) for seed, length in enumerate(lengths)]
    waiting = [list(pieces_of(mine, sizes(i))) for i, mine in enumerate(codes)]
    states = [decoder.new_state() for _ in lengths]
    samples = [[] for _ in lengths]
    while any(waiting):
        live = [i for i, parts in enumerate(waiting) if parts and rng.random() < busy]
        rng.shuffle(live)
        for i, new in zip(
            live, decoder.forward([Piece(waiting[i].pop(0), states[i]) for i in live]), strict=True
        ):
            samples[i].append(new)
    return codes, [torch.cat(parts) for parts in samples]


def test_streams_in_different_phases_share_passes(decoder, reference, monkeypatch):
    rng = random.Random(5)
    shapes = []
    decode = decoder._decode
    monkeypatch.setattr(
        decoder, "_decode", lambda codes, memory, ages: shapes.append(ages) or decode(codes, memory, ages)
    )
    lengths = [rng.randint(1, 150) for _ in range(9)]
    codes, samples = run_together(decoder, lengths, rng, 0.6, lambda i: [12, 12, 5] if i % 3 else [12])
    for mine, got in zip(codes, samples, strict=True):
        assert_close(got, whole(reference, mine))
    assert any(0 in ages and max(ages) > 0 for ages in shapes), "no first chunk was beside a later one"
    assert any(min(ages) < 71 < max(ages) for ages in shapes), "no full window was beside a filling one"


def test_a_first_chunk_beside_a_later_one(decoder, reference):
    old, new = random_codes(120, 1), random_codes(25, 2)
    states = [decoder.new_state(), decoder.new_state()]
    begun = decoder.forward([Piece(old[:95], states[0])])[0]
    rest, first = decoder.forward([Piece(old[95:], states[0]), Piece(new, states[1])])
    assert_close(torch.cat([begun, rest]), whole(reference, old))
    assert_close(first, whole(reference, new))


def test_neighbours_change_rounding_at_most(decoder):
    codes = random_codes(25, 1)
    alone = decoder.forward([Piece(codes, decoder.new_state())])[0]
    for seed in (2, 3):
        pieces = [Piece(random_codes(25, seed + n), decoder.new_state()) for n in range(5)]
        pieces.insert(seed, Piece(codes, decoder.new_state()))
        assert_close(decoder.forward(pieces)[seed], alone, 1e-12)


def test_passes_are_bounded(decoder, full, monkeypatch):
    shapes = []
    decode = decoder._decode
    monkeypatch.setattr(
        decoder, "_decode", lambda codes, *rest: shapes.append(tuple(codes.shape[:2])) or decode(codes, *rest)
    )
    monkeypatch.setattr(waveform_decoder, "MAX_BATCH_FRAMES", 200)
    pieces = [Piece(random_codes(FRAMES), decoder.new_state()) for _ in range(3)]
    for samples in decoder.forward(pieces):
        assert_close(samples, full)
    assert shapes == [(2, 100), (1, 100), (2, 80), (1, 80)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_the_whole(decoder, reference, data):
    sizes = st.lists(st.integers(1, 30), min_size=1, max_size=5)
    schedules = data.draw(st.lists(sizes, min_size=1, max_size=4))
    lengths = [data.draw(st.integers(1, 50)) for _ in schedules]
    rng = random.Random(data.draw(st.integers(0, 99)))
    codes, samples = run_together(decoder, lengths, rng, 0.7, lambda i: schedules[i])
    for mine, got in zip(codes, samples, strict=True):
        assert_close(got, whole(reference, mine))


def test_state_does_not_grow(decoder):
    pieces = [Piece(random_codes(25, seed), decoder.new_state()) for seed in range(2)]
    for _ in range(30):
        decoder.forward(pieces)
    for piece in pieces:
        memory = piece.state.memory
        assert memory.nbytes == memory.untyped_storage().nbytes() == decoder.state_bytes
        assert memory.isfinite().all() and piece.state.frames == 750


def test_a_long_stream_depends_on_its_last_frames_only(decoder):
    """Two layers see 2 · 71 frames back, the convolutions 11 more: what lies before is forgotten."""
    tail = random_codes(30, 1)
    samples = []
    for seed, length in ((2, 160), (3, 700)):
        codes = torch.cat([random_codes(length, seed), random_codes(160, 4), tail])
        samples.append(streamed(decoder, codes, [50])[-30 * decoder.samples_per_frame :])
    assert_close(samples[0], samples[1])


@pytest.mark.parametrize("window", [71, 73])
def test_another_window_would_be_seen(reference, full, tmp_path, window):
    decoder = make_decoder(reference, tmp_path, sliding_window=window)
    samples = streamed(decoder, random_codes(FRAMES), [25])
    assert_close(samples[: 60 * 1920], full[: 60 * 1920])
    assert (samples - full).abs().max() > 1e-4


def test_a_lost_tail_would_be_seen(decoder, full):
    codes, state = random_codes(FRAMES), decoder.new_state()
    decoder.forward([Piece(codes[:100], state)])
    state.memory[-6:] = 0
    samples = decoder.forward([Piece(codes[100:], state)])[0]
    assert (samples - full[len(full) - len(samples) :]).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(reference, full, tmp_path, dtype):
    decoder = make_decoder(reference, tmp_path, dtype)
    codes = random_codes(FRAMES)[:40]
    samples = streamed(decoder, codes, [4, 25, 11])
    assert samples.dtype == dtype
    error = samples.double() - full[: len(samples)]
    assert error.std() < 0.05 * full.std()


def test_nothing_gives_nothing(decoder):
    assert decoder.forward([]) == []
    state = decoder.new_state()
    (samples,) = decoder.forward([Piece(random_codes(0), state)])
    assert samples.shape == (0,) and state.frames == 0


def test_older_configs_are_read_too():
    older = {k: v for k, v in Qwen3OmniMoeCode2WavConfig(**TINY).to_dict().items() if k != "rope_parameters"}
    del older["head_dim"], older["attention_bias"]
    config = WaveformConfig.from_hf({**older, "rope_theta": 5000})
    assert (config.rope_theta, config.head_dim, config.attention_bias) == (5000.0, 4, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; this decoder computes only silu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"decoder_dim": None}, "decoder_dim"),
        ({"upsample_rates": 8}, "cannot be used"),
        ({"sliding_window": 1}, "sliding_window 1; give at least 2"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(changes, words):
    config = {**Qwen3OmniMoeCode2WavConfig(**TINY).to_dict(), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        WaveformConfig.from_hf(config)


def test_weights_that_do_not_fit_are_named(reference, tmp_path):
    with pytest.raises(ConfigError, match=r"'code2wav.code_embedding.weight' has the shape \[64, 16\]"):
        make_decoder(reference, tmp_path, codebook_size=17)
