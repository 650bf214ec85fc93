from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from tritone.errors import ConfigError  # noqa: E402
from tritone.networks.experts import ExpertsConfig, MixtureOfExperts, by_all, by_expert, by_pair  # noqa: E402
from tritone.networks.weights import Weights  # noqa: E402

HIDDEN, INNER, EXPERTS, CHOSEN = 12, 5, 6, 3
CONFIG = {
    "hidden_size": HIDDEN,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
}


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "gate.weight": (EXPERTS, HIDDEN),
        "experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
        "experts.down_proj": (EXPERTS, HIDDEN, INNER),
        "shared_expert_gate.weight": (1, HIDDEN),
    }
    return {f"mlp.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def one_by_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same experts under names of their own."""
    apart = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for i in range(EXPERTS):
        gate, up = weights["mlp.experts.gate_up_proj"][i].split(INNER)
        parts = {"gate": gate, "up": up, "down": weights["mlp.experts.down_proj"][i]}
        apart |= {f"mlp.experts.{i}.{name}_proj.weight": part.clone() for name, part in parts.items()}
    return apart


def build(
    folder: Path, stored: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **changes: object
) -> MixtureOfExperts:
    save_file(stored, folder / "model.safetensors")
    config = ExpertsConfig.from_hf({**CONFIG, **changes})
    assert config is not None
    shared = torch.cos if config.shared_intermediate else None
    return MixtureOfExperts(config, Weights(folder), "mlp.", torch.device("cpu"), dtype, shared)


def rows(count: int) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(count))


def expected(weights: dict[str, torch.Tensor], x: torch.Tensor, renormalise: bool) -> torch.Tensor:
    """The definition, row by row."""
    out = []
    for row in x:
        shares = (weights["mlp.gate.weight"] @ row).softmax(-1)
        chosen = shares.argsort(descending=True)[:CHOSEN].tolist()
        whole = shares[chosen].sum() if renormalise else 1.0
        total = torch.zeros(HIDDEN)
        for i in chosen:
            gate, up = (weights["mlp.experts.gate_up_proj"][i] @ row).split(INNER)
            total += shares[i] / whole * (weights["mlp.experts.down_proj"][i] @ (gate * gate.sigmoid() * up))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_rows_are_sums_over_their_experts(tmp_path: Path, count: int, renormalise: bool) -> None:
    weights, x = random_weights(), rows(count)
    experts = build(tmp_path, weights, norm_topk_prob=renormalise)
    torch.testing.assert_close(experts(x), expected(weights, x, renormalise), atol=1e-5, rtol=1e-5)


def test_the_shared_expert_is_weighed_by_its_gate(tmp_path: Path) -> None:
    weights, x = random_weights(), rows(4)
    experts = build(tmp_path, weights, shared_expert_intermediate_size=7)
    shared = (x @ weights["mlp.shared_expert_gate.weight"].T).sigmoid() * x.cos()
    torch.testing.assert_close(experts(x), expected(weights, x, True) + shared, atol=1e-5, rtol=1e-5)


def test_both_ways_through_the_experts_agree() -> None:
    weights, x = random_weights(), rows(30)
    stacked = weights["mlp.experts.gate_up_proj"], weights["mlp.experts.down_proj"]
    chosen = torch.rand((30, EXPERTS), generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :CHOSEN]
    for some in (chosen, chosen[:, :1], torch.full_like(chosen[:, :1], EXPERTS - 1)):
        torch.testing.assert_close(by_pair(x, some, *stacked), by_expert(x, some, *stacked))


def test_the_way_of_few_pairs_depends_on_no_value() -> None:
    """On a device without values, whatever asked for one would fail."""
    shapes = (4, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    x, gate_up, down = (torch.empty(shape, device="meta") for shape in shapes)
    chosen = torch.empty((4, CHOSEN), dtype=torch.int64, device="meta")
    assert by_pair(x, chosen, gate_up, down).shape == (4, CHOSEN, HIDDEN)
    with pytest.raises((RuntimeError, NotImplementedError)):
        by_expert(x, chosen, gate_up, down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_both_forms_of_stored_experts_are_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    weights, x = random_weights(), rows(5).to(dtype)
    folders = tmp_path / "fused", tmp_path / "apart"
    for folder in folders:
        folder.mkdir()
    fused, apart = (
        build(folder, stored, dtype)
        for folder, stored in zip(folders, (weights, one_by_one(weights)), strict=True)
    )
    assert fused(x).dtype == dtype and torch.equal(fused(x), apart(x))


def test_routes_are_found_in_float32(tmp_path: Path) -> None:
    """Shares in bfloat16 would make ties of what are none, and the wrong expert might win."""
    weights = random_weights()
    weights["mlp.gate.weight"] = torch.zeros(EXPERTS, HIDDEN)
    weights["mlp.gate.weight"][:, 0] = 2.0
    weights["mlp.gate.weight"][4, 1] = 2.0**-7
    experts = build(tmp_path, weights, torch.bfloat16, num_experts_per_tok=1)
    x = torch.zeros((1, HIDDEN), dtype=torch.bfloat16)
    x[0, :2] = torch.tensor([2.0**-6, 1.0])
    chosen, shares = experts.route(x)
    assert chosen.tolist() == [[4]] and shares.dtype == torch.bfloat16 and shares.tolist() == [[1.0]]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    stored = one_by_one(random_weights())
    del stored["mlp.experts.5.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"has no weight 'mlp\.experts\.5\.up_proj\.weight'"):
        build(tmp_path, stored)


@pytest.mark.parametrize("count", [1, 300])
def test_all_rows_through_all_experts_is_the_same_sum(count: int) -> None:
    weights, x = random_weights(), rows(count)
    gate_up, down = (weights[f"mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    shares, chosen = (x @ weights["mlp.gate.weight"].T).softmax(-1).topk(CHOSEN)
    expected = (by_expert(x, chosen, gate_up, down) * shares.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(by_all(x, chosen, shares, gate_up, down), expected, atol=1e-5, rtol=1e-5)


def test_the_shared_expert_stands_behind_the_others_in_pieces(tmp_path: Path) -> None:
    weights, width = random_weights(), 7
    parts = {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}
    given = {name: torch.randn(shape) for name, shape in parts.items()}
    weights |= {f"mlp.shared_expert.{name}_proj.weight": part for name, part in given.items()}
    stored = build(tmp_path, weights, shared_expert_intermediate_size=width).weights
    assert len(stored.gate_up) == len(stored.down) == EXPERTS + 2
    x = rows(3)
    out = torch.zeros_like(x)
    for gate_up, down in zip(stored.gate_up[EXPERTS:], stored.down[EXPERTS:], strict=True):
        gate, up = (x @ gate_up.T).chunk(2, dim=-1)
        out += (gate * gate.sigmoid() * up) @ down.T
    gate, up = x @ given["gate"].T, x @ given["up"].T
    torch.testing.assert_close(out, (gate * gate.sigmoid() * up) @ given["down"].T, atol=1e-5, rtol=1e-5)
