"""A chat model with random weights, small enough to load in every test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from tritone.engines.base import Delta, Placement  # noqa: E402
from tritone.engines.torch_ar import TorchEngine, TorchOptions  # noqa: E402

CONTROL_TOKENS = ("<|end|>", "<|turn|>")
EOS_ID = 0
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def build_tokenizer() -> Tokenizer:
    """Byte-level: a token for each byte after the control tokens, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate((*CONTROL_TOKENS, *alphabet))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


def random_weights(config: dict[str, int]) -> dict[str, torch.Tensor]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(3)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else 0.25 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = build_tokenizer()
    config = {**CONFIG, "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(random_weights(config), folder / "model.safetensors")
    return folder


@pytest.fixture
def make_engine(checkpoint: Path) -> Callable[..., TorchEngine]:
    def make(**options: object) -> TorchEngine:
        defaults = {"max_slots": 8, "max_context_tokens": 256, "prefill_chunk_tokens": 16}
        return TorchEngine(Placement(checkpoint), TorchOptions(**{**defaults, **options}))

    return make


class Answers:
    """What an engine said, by session."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[str]] = {}
        self.tokens: dict[str, list[int]] = {}  # behind each piece
        self.last: dict[str, Delta] = {}  # the delta that ended a session

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.session not in self.last, "nothing comes after the last delta"
            assert delta.outputs.get("text") != "", "empty text is not sent"
            if "text" in delta.outputs:
                self.pieces.setdefault(delta.session, []).append(str(delta.outputs["text"]))
                self.tokens.setdefault(delta.session, []).append(int(delta.outputs["num_tokens"]))
            if delta.finish_reason is not None or delta.error is not None:
                self.last[delta.session] = delta

    def text(self, session: str) -> str:
        return "".join(self.pieces.get(session, []))


def run(engine: TorchEngine, answers: Answers | None = None, steps: int | None = None) -> Answers:
    """Step until there is no work, or `steps` times, checking the engine at every step."""
    answers = answers or Answers()
    while engine.has_work and steps != 0:
        answers.take(engine.step())
        engine.check_integrity()
        steps = None if steps is None else steps - 1
    return answers


def ask(engine: TorchEngine, session: str, text: str = "Hello", **sampling: object) -> None:
    messages = json.dumps([{"role": "user", "content": text}])
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True, **sampling}
    engine.add_request(session, {"messages": messages}, {"sampling": settings})
