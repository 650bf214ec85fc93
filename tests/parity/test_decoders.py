"""The decoder against those of `transformers` that see, speak and choose experts, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs  # noqa: E402
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as models  # noqa: E402

from tritone.networks.decoder import Decoder  # noqa: E402
from tritone.networks.decoder_config import DecoderConfig  # noqa: E402
from tritone.networks.spans import Span  # noqa: E402
from tritone.networks.weights import Weights  # noqa: E402

MULTIMODAL_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}
AUDIO = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "downsample_hidden_size": 8,
    "output_dim": SIZES["hidden_size"],
}
IMAGE, VIDEO, VISION_START, VISION_END, AUDIO_PAD, AUDIO_START = range(150, 156)
LIMITS = {torch.float32: 2e-5, torch.float64: 1e-10}


@dataclass
class Reference:
    """A model of `transformers`, and how its decoder is found in a checkpoint."""

    model: Any
    decoder: Any  # the part of the model that takes rows and gives hidden states
    family: str
    prefix: str
    embedding: str | None = None
    head: str | None = None

    def run(self, rows: torch.Tensor, positions: torch.Tensor | None = None, **features: Any) -> Any:
        """Hidden states after 0, 1, … layers, each [N, H], of one sequence; the last are normalised."""
        if positions is not None:
            positions = positions[:, None] if positions.dim() == 2 else positions[None]
        with torch.no_grad():
            out = self.decoder(
                inputs_embeds=rows[None], position_ids=positions, output_hidden_states=True, **features
            )
        return [state[0] for state in out.hidden_states]

    def build(self, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
        config = DecoderConfig.from_hf(self.decoder.config.to_dict(), self.family)
        names = {"prefix": self.prefix, "embedding": self.embedding, "head": self.head}
        options = {"slots": 4, "context_tokens": 64, **names, **options}
        return Decoder(config, Weights(folder), dtype=dtype, **options)


def dense() -> Reference:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    return Reference(model, model.model, "qwen3", "model.", "embed_tokens.weight", "lm_head.weight")


def mixed() -> Reference:
    """Layers with experts between dense ones, and shares that do not add up to 1."""
    changes = {"mlp_only_layers": [2], "norm_topk_prob": False, "attention_bias": True}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, **changes))
    return Reference(model, model.model, "qwen3_moe", "model.", "embed_tokens.weight", "lm_head.weight")


def thinker() -> Reference:
    text = {**SIZES, **EXPERTS, "norm_topk_prob": True, "rope_parameters": MULTIMODAL_ROPE}
    config = configs.Qwen3OmniMoeThinkerConfig(
        audio_config=AUDIO,
        vision_config=VISION,
        text_config=text,
        position_id_per_seconds=13,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        audio_token_id=AUDIO_PAD,
        audio_start_token_id=AUDIO_START,
    )
    model = models.Qwen3OmniMoeThinkerForConditionalGeneration(config)
    return Reference(model, model.model, "qwen3_moe", "model.", "embed_tokens.weight", "lm_head.weight")


def talker() -> Reference:
    shared = {"shared_expert_intermediate_size": 32, "norm_topk_prob": True}
    text = {**SIZES, **EXPERTS, **shared, "rope_parameters": MULTIMODAL_ROPE}
    config = configs.Qwen3OmniMoeTalkerConfig(
        text_config=text,
        code_predictor_config={**SIZES, "num_code_groups": 4},
        num_code_groups=4,
        thinker_hidden_size=SIZES["hidden_size"],
        spatial_merge_size=2,
    )
    model = models.Qwen3OmniMoeTalkerForConditionalGeneration(config)
    return Reference(model, model.model, "qwen3_moe", "model.", "codec_embedding.weight", "codec_head.weight")


def code_predictor() -> Reference:
    model = talker().model.code_predictor
    return Reference(model, model.model, "qwen3", "model.")


REFERENCES: dict[str, Callable[[], Reference]] = {
    made.__name__: made for made in (dense, mixed, thinker, talker, code_predictor)
}


def randomised(made: Callable[[], Reference]) -> Reference:
    """With norms, biases and routers that matter; some experts are not even set to numbers."""
    torch.manual_seed(17)
    reference = made()
    with torch.no_grad():
        for name, weight in reference.model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
            elif "mlp" in name:
                weight.normal_(0.0, 0.5 if name.endswith("gate.weight") else 0.2)
    reference.model.eval()
    reference.model.set_experts_implementation("eager")  # the others have no float64
    return reference


def store(reference: Reference, folder: Path) -> Path:
    """The state as it is: experts of a layer in one tensor."""
    save_file(
        {k: v.contiguous() for k, v in reference.model.state_dict().items()}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture(params=REFERENCES, scope="module")
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Reference, Path]:
    reference = randomised(REFERENCES[request.param])
    return reference, store(reference, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=LIMITS, ids=str, scope="module")
def dtype(request: pytest.FixtureRequest, stored: tuple[Reference, Path]) -> Iterator[torch.dtype]:
    """The dtype that a test is done in, with the reference cast to it."""
    model = stored[0].model.to(request.param)
    for module in model.modules():
        # Theirs goes through float32 whatever the dtype.
        if request.param == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            weight, eps = module.weight, module.variance_epsilon
            module.forward = partial(
                torch.nn.functional.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps
            )
    yield request.param
    for module in model.modules():
        module.__dict__.pop("forward", None)
    model.to(torch.float32)


def random_rows(count: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, SIZES["hidden_size"]), generator=generator).to(dtype)


def grid_positions(count: int) -> torch.Tensor:
    """float32 [3, count]: text, twelve rows of a picture with fractions of a time, text."""
    text = torch.arange(5.0).expand(3, -1)
    times = torch.tensor([5.0, 9.55]).repeat_interleave(6)
    heights = torch.arange(5.0, 7.0).repeat_interleave(3).repeat(2)
    widths = torch.arange(5.0, 8.0).repeat(4)
    after = torch.arange(count - 17).expand(3, -1) + 10.55
    return torch.cat((text, torch.stack((times, heights, widths)), after), dim=1)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
    assert difference <= LIMITS[expected.dtype], f"largest difference {difference:.3g}"


@pytest.mark.parametrize("cuts", [(40,), (7, 16, 17), (1, 30, *[1] * 9)], ids=str)
def test_a_sequence_in_pieces(
    stored: tuple[Reference, Path], dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    reference, folder = stored
    rows = random_rows(40, dtype)
    decoder = reference.build(folder, dtype)
    positions = grid_positions(40) if "mrope_section" in decoder.config.rope else None
    expected = reference.run(rows, positions)
    hidden, tapped, start = [], [], 0
    for count in cuts:
        piece = slice(start, start + count)
        given = None if positions is None else positions[:, piece]
        out = decoder.forward(rows[piece], [Span(2, start, count)], positions=given, tap=2)
        hidden.append(out.hidden)
        tapped.append(out.tapped)
        start += count
    assert_near(torch.cat(hidden), expected[-1])
    assert_near(torch.cat(tapped), expected[2])


def test_slots_run_together_as_they_run_alone(stored: tuple[Reference, Path], dtype: torch.dtype) -> None:
    """Prompts and single rows in one pass, in slots that are equally full and in slots that are not."""
    reference, folder = stored
    decoder = reference.build(folder, dtype)
    sequences = [random_rows(24, dtype, seed) for seed in range(4)]
    expected = [reference.run(rows)[-1] for rows in sequences]
    passes: list[dict[int, int]] = [
        {0: 9, 1: 9, 2: 4},  # two equal prompts and a shorter one
        {0: 1, 1: 1, 2: 5, 3: 9},
        {0: 1, 1: 1, 2: 1, 3: 1},  # two equal pairs
        {2: 5, 3: 5, 0: 4, 1: 4},  # and not in the order of the slots
        {0: 1, 1: 1, 2: 1, 3: 1},
        {3: 1, 2: 1, 1: 1, 0: 1},  # equally full, but neighbours the wrong way round
    ]
    filled = [0] * 4
    for counts in passes:
        spans = [Span(slot, filled[slot], count) for slot, count in counts.items()]
        rows = torch.cat([sequences[span.slot][span.start : span.end] for span in spans])
        hidden = decoder.forward(rows, spans).hidden
        for span, part in zip(spans, hidden.split([span.count for span in spans]), strict=True):
            assert_near(part, expected[span.slot][span.start : span.end])
            filled[span.slot] = span.end
    assert filled == [17, 17, 17, 17]


@pytest.mark.parametrize("stored", ["thinker", "talker", "mixed", "dense"], indirect=True)
def test_scores_of_embedded_tokens(stored: tuple[Reference, Path], dtype: torch.dtype) -> None:
    reference, folder = stored
    decoder = reference.build(folder, dtype)
    tokens = torch.randint(0, SIZES["vocab_size"], (20,), generator=torch.Generator().manual_seed(5))
    head = reference.model.get_parameter(reference.head)
    embedding = reference.decoder.get_parameter(reference.embedding)
    with torch.no_grad():
        expected = torch.nn.functional.linear(reference.run(embedding[tokens])[-1], head)
    logits = decoder.logits(decoder.forward(decoder.embed(tokens), [Span(0, 0, 20)]).hidden)
    # Scores are sums of as many terms as a hidden state has, each with its error.
    torch.testing.assert_close(logits, expected, atol=4 * LIMITS[dtype], rtol=0)
    assert torch.equal(decoder.embed(tokens.tolist()), decoder.embed(tokens))
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("stored", ["thinker"], indirect=True)
class TestPictures:
    """The thinker answers a question about two pictures, from its own `generate`."""

    STEPS = 4

    def answer(self, reference: Reference, dtype: torch.dtype) -> tuple[Any, list[int], list[Any], Any]:
        """What `generate` gives, the tokens, the features for each of the first layers, and the positions."""
        generator = torch.Generator().manual_seed(8)
        grids = torch.tensor([[1, 4, 4], [1, 4, 6]])
        pixels = torch.randn((40, 3 * 2 * 16 * 16), generator=generator).to(dtype)
        first, second = ([VISION_START, *[IMAGE] * count, VISION_END] for count in (4, 6))
        tokens = [7, 8, 9, *first, 10, 11, *second, 12, 13, 14]
        with torch.no_grad():
            out = reference.model.generate(
                input_ids=torch.tensor([tokens]),
                attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64),
                pixel_values=pixels,
                image_grid_thw=grids,
                do_sample=False,
                min_new_tokens=self.STEPS,
                max_new_tokens=self.STEPS,
                eos_token_id=0,
                pad_token_id=0,
                output_hidden_states=True,
                output_logits=True,
                return_dict_in_generate=True,
            )
            features = reference.model.get_image_features(pixels, grids).deepstack_features
            positions, delta = reference.model.get_rope_index(
                torch.tensor([tokens]), grids, attention_mask=torch.ones((1, len(tokens)))
            )
        after = torch.arange(len(tokens), len(tokens) + self.STEPS).expand(3, -1) + delta
        return out, tokens, features, torch.cat((positions[:, 0], after.float()), dim=1)

    @pytest.mark.parametrize("tap", range(SIZES["num_hidden_layers"] + 1))
    def test_hidden_states_of_generate(
        self, stored: tuple[Reference, Path], dtype: torch.dtype, tap: int
    ) -> None:
        reference, folder = stored
        out, tokens, features, positions = self.answer(reference, dtype)
        assert len(features) == 2 and not positions[0].equal(positions[1])
        decoder = reference.build(folder, dtype)
        prompt = len(tokens)
        pictured = torch.tensor([i for i, token in enumerate(tokens) if token == IMAGE])
        rows, given, additions = out.hidden_states[0][0][0], positions[:, :prompt], []
        additions = [(pictured, values) for values in features]
        start = 0
        for step in range(self.STEPS):
            result = decoder.forward(
                rows, [Span(1, start, len(rows))], positions=given, additions=additions, tap=tap
            )
            assert_near(result.tapped, out.hidden_states[step][tap][0])
            assert_near(result.hidden, out.hidden_states[step][-1][0])
            token = decoder.logits(result.hidden[-1:]).argmax().item()
            assert token == out.sequences[0, prompt + step].item()
            start = prompt + step
            rows, given, additions = decoder.embed([token]), positions[:, start : start + 1], []

    def test_prompt_in_pieces(self, stored: tuple[Reference, Path], dtype: torch.dtype) -> None:
        """Cut through the pictures: a piece takes the features of its own rows."""
        reference, folder = stored
        out, tokens, features, positions = self.answer(reference, dtype)
        decoder = reference.build(folder, dtype)
        pictured = [i for i, token in enumerate(tokens) if token == IMAGE]
        rows, start, hidden = out.hidden_states[0][0][0], 0, []
        for count in (2, 4, 10, len(tokens) - 16):
            inside = [n for n, i in enumerate(pictured) if start <= i < start + count]
            places = torch.tensor([pictured[n] - start for n in inside], dtype=torch.int64)
            hidden.append(
                decoder.forward(
                    rows[start : start + count],
                    [Span(0, start, count)],
                    positions=positions[:, start : start + count],
                    additions=[(places, values[inside]) for values in features],
                ).hidden
            )
            start += count
        assert start == len(tokens)
        assert_near(torch.cat(hidden), out.hidden_states[0][-1][0])


@pytest.mark.parametrize("stored", ["code_predictor"], indirect=True)
def test_codes_of_frames_side_by_side(stored: tuple[Reference, Path], dtype: torch.dtype) -> None:
    """The residual codes of three frames, one a slot and all at the same place, as `generate` draws them."""
    reference, folder = stored
    decoder, weights = reference.build(folder, dtype), Weights(folder)
    starts = [random_rows(2, dtype, seed) for seed in range(3)]
    spans = partial(_spans, slots=3)
    hidden = decoder.forward(torch.cat(starts), spans(0, 2)).hidden[1::2]
    codes: list[torch.Tensor] = []
    for group in range(3):
        head = weights[f"lm_head.{group}.weight"].to(dtype)
        codes.append(torch.nn.functional.linear(hidden, head).argmax(-1))
        table = weights[f"model.codec_embedding.{group}.weight"].to(dtype)
        hidden = decoder.forward(table[codes[-1]], spans(2 + group, 1)).hidden
    for slot, start in enumerate(starts):
        expected = reference.model.generate(inputs_embeds=start[None], max_new_tokens=3, do_sample=False)
        assert [code[slot].item() for code in codes] == expected[0].tolist()


def _spans(start: int, count: int, slots: int) -> Sequence[Span]:
    return [Span(slot, start, count) for slot in range(slots)]


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    """As released checkpoints have them, and `save_pretrained` writes them for some models."""
    reference = randomised(mixed)
    reference.model.save_pretrained(tmp_path)
    decoder = reference.build(tmp_path)
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in Weights(tmp_path)
    rows = random_rows(12, torch.float32)
    assert_near(decoder.forward(rows, [Span(0, 0, 12)]).hidden, reference.run(rows)[-1])
