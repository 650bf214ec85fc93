"""The decoder against `transformers` in float32: random models of each family, and the real thinker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tritone.checkpoint import checkpoint_dir  # noqa: E402
from tritone.engines.base import Placement  # noqa: E402
from tritone.engines.torch_ar import TorchEngine, TorchOptions  # noqa: E402
from tritone.networks.decoder import Decoder  # noqa: E402
from tritone.networks.decoder_config import DecoderConfig  # noqa: E402
from tritone.networks.spans import Span  # noqa: E402
from tritone.networks.weights import Weights  # noqa: E402

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("Llama", {"head_dim": 8, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-long": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
PROMPTS = (
    "What is the capital of France?",
    "Tell me a joke about cats.",
    "Explain gravity to a child in two sentences.",
    "Write a haiku about rain.",
    "How do I boil an egg?",
    "Name three colours and one animal that has each of them.",
    "Who wrote Hamlet, and when?",
    "Pourquoi le ciel est-il bleu ? 聪明",
)
ANSWER_TOKENS = 8


@pytest.fixture(params=MODELS)
def random_model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[transformers.PreTrainedModel, Path]:
    """A small model of each family with random weights, norms and biases included, and its folder."""
    family, changes = MODELS[request.param]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def build(folder: Path, **options: int) -> Decoder:
    config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_bytes()))
    return Decoder(config, Weights(folder), **{"slots": 3, "context_tokens": 128, **options})


@pytest.mark.parametrize("cuts", [(90,), (1, 89), (32, 32, 26), (50, *[1] * 40)], ids=str)
def test_prompt_in_pieces_gives_the_logits_of_transformers(
    random_model: tuple[transformers.PreTrainedModel, Path], cuts: tuple[int, ...]
) -> None:
    model, folder = random_model
    tokens = torch.randint(
        0, SIZES["vocab_size"], (sum(cuts),), generator=torch.Generator().manual_seed(5)
    ).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    decoder = build(folder)
    logits, start = [], 0
    for count in cuts:
        hidden = decoder.forward(decoder.embed(tokens[start : start + count]), [Span(1, start, count)]).hidden
        logits.append(decoder.logits(hidden))
        start += count
    torch.testing.assert_close(torch.cat(logits), expected, atol=2e-4, rtol=1e-4)


def test_slots_run_together_as_they_run_alone(
    random_model: tuple[transformers.PreTrainedModel, Path],
) -> None:
    """Prompts of different lengths in one pass, then single tokens of some slots beside a prompt."""
    model, folder = random_model
    generator = torch.Generator().manual_seed(6)
    sequences = [
        torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in (40, 17, 63)
    ]
    with torch.no_grad():
        expected = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
    decoder = build(folder)
    filled = [0, 0, 0]
    for counts in ((39, 10, 0), (1, 1, 30), (0, 1, 1), (0, 5, 32)):
        spans = [Span(slot, filled[slot], count) for slot, count in enumerate(counts) if count]
        rows = [token for span in spans for token in sequences[span.slot][span.start : span.end]]
        logits = decoder.logits(decoder.forward(decoder.embed(rows), spans).hidden)
        for span, part in zip(spans, logits.split([span.count for span in spans]), strict=True):
            torch.testing.assert_close(part, expected[span.slot][span.start : span.end], atol=2e-4, rtol=1e-4)
            filled[span.slot] = span.end
    assert filled == [40, 17, 63]


@pytest.fixture(scope="module")
def thinker() -> Path:
    """The thinker's checkpoint: `$TRITONE_CHECKPOINT`, else where the build puts it."""
    named = os.environ.get("TRITONE_CHECKPOINT")
    folder = (Path(named) if named else checkpoint_dir("smoltalk")) / "thinker"
    if not (folder / "config.json").is_file():
        pytest.skip(f"no checkpoint in {folder}; run `python build/smoltalk.py`")
    return folder


@pytest.fixture(scope="module")
def expected(thinker: Path) -> list[list[int]]:
    """Greedy answers of `transformers`, ids after each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(thinker, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinker)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=ANSWER_TOKENS
            )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@pytest.fixture(scope="module")
def engine(thinker: Path) -> Iterator[TorchEngine]:
    yield TorchEngine(Placement(thinker), TorchOptions(max_slots=8, max_context_tokens=512))


def answer_tokens(engine: TorchEngine, prompts: dict[str, str], **sampling: float) -> dict[str, list[int]]:
    """Answers, greedy by default, of prompts that are in flight together."""
    for session, prompt in prompts.items():
        messages = json.dumps([{"role": "user", "content": prompt}])
        engine.add_request(
            session, {"messages": messages}, {"sampling": {"max_tokens": ANSWER_TOKENS, **sampling}}
        )
    live = dict(engine._sessions)
    while engine.has_work:
        engine.step()
    return {name: session.tokens[session.prompt_tokens :] for name, session in live.items()}


@pytest.mark.weights
@pytest.mark.slow
def test_greedy_alone(engine: TorchEngine, expected: list[list[int]]) -> None:
    for prompt, answer in zip(PROMPTS[5:], expected[5:], strict=True):
        assert answer_tokens(engine, {"alone": prompt})["alone"] == answer


@pytest.mark.weights
@pytest.mark.slow
def test_greedy_eight_in_flight(engine: TorchEngine, expected: list[list[int]]) -> None:
    together = answer_tokens(engine, {str(i): prompt for i, prompt in enumerate(PROMPTS)})
    assert [together[str(i)] for i in range(len(PROMPTS))] == expected


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"top_p": 0.95}, {"top_k": 40, "min_p": 0.02}, {}], ids=str)
def test_sampled_tokens_do_not_depend_on_neighbours(engine: TorchEngine, sampling: dict[str, float]) -> None:
    settings = {"temperature": 0.8, "seed": 21, **sampling}
    together = answer_tokens(engine, {str(i): prompt for i, prompt in enumerate(PROMPTS)}, **settings)
    for i in (0, 5):
        assert answer_tokens(engine, {"alone": PROMPTS[i]}, **settings)["alone"] == together[str(i)]


@pytest.mark.weights
@pytest.mark.slow
def test_greedy_without_prefix_cache(thinker: Path, expected: list[list[int]]) -> None:
    options = TorchOptions(max_slots=2, max_context_tokens=512, prefill_chunk_tokens=7, prefix_cache=False)
    engine = TorchEngine(Placement(thinker), options)
    for prompt, answer in zip(PROMPTS[:3], expected, strict=False):
        assert answer_tokens(engine, {"alone": prompt})["alone"] == answer


@pytest.mark.weights
@pytest.mark.slow
def test_tokenizer_is_the_one_of_transformers(engine: TorchEngine, thinker: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinker)
    for text in (*PROMPTS, "a  b\n\n\tc 12345 ½ don't 🙂👩‍👩‍👧", "def f(x):\n    return x"):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert engine._tokenizer.prompt(messages) == ids
