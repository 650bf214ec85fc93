"""The next token of many rows, drawn so that a row's token depends on nothing but the row.

    logits ─► penalty, banned ids ─► ÷ temperature ─► min-p ─► top-k ─► top-p ─► + noise ─► argmax

The noise is Gumbel, so the argmax is a draw from the softmax of what the filters left (Gumbel-max trick).
It comes from a counter-based generator, Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011): a pure function of (seed, position, codebook, token) without any
state. A request therefore draws the same tokens alone or in a batch, in any slot, for any cut of its
prompt, and after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tritone.sampling import Sampling

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: float32 logits divided by it are no longer distinct
NUCLEUS_WIDTH = 256  # top-p looks this far down the ranking before it sorts the whole vocabulary

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Row:
    """What a draw must know of one row of logits."""

    sampling: Sampling
    position: int  # place in the sequence, prompt included, of the token to draw
    penalised: Sequence[int] = ()  # token ids that the repetition penalty applies to; may repeat
    banned: Sequence[int] = ()  # token ids that must not come now

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[Row], codebook: int = 0) -> Tensor:
    """Token ids, int64 [B], of logits [B, V]; float32 logits are overwritten.

    codebook: tells draws at the same position apart, when one position has several codes.
    """
    logits = logits.float()
    for scores, row in zip(logits, rows, strict=True):
        _adjust(scores, row)
    return Draw(rows, logits.shape[-1], logits.device)(logits, codebook)


class Draw:
    """The draw of some rows, prepared once for the many codes of a frame; without penalties and bans."""

    def __init__(
        self, rows: Sequence[Row], vocabulary: int, device: torch.device, codebooks: Sequence[int] = ()
    ) -> None:
        """codebooks: those whose noise is made now, in one go; that of others is made when it is needed."""
        settings = [row.sampling for row in rows]
        drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
        self._drawn = None if len(drawn) == len(rows) else drawn  # None: all of them
        self._is_greedy = not drawn
        if self._is_greedy:
            return
        self._filters = _Filters.of([rows[i] for i in drawn], device)
        self._has_min_p = any(settings[i].min_p for i in drawn)
        limited = [at for at, i in enumerate(drawn) if 0 < settings[i].top_k < vocabulary]
        others = [at for at in range(len(drawn)) if at not in limited]
        nucleus = [at for at in others if settings[drawn[at]].top_p < 1.0]
        self._nucleus = nucleus
        self._whole = [at for at in others if at not in nucleus]
        # Each top-k for itself: which of several equal logits come in depends on how many are taken.
        by_top_k: dict[int, list[int]] = {}
        for at in limited:
            by_top_k.setdefault(settings[drawn[at]].top_k, []).append(at)
        self._limited = [_Limited(top_k, at, self._filters.select(at)) for top_k, at in by_top_k.items()]
        self._nucleus_filters = self._filters.select(nucleus)
        self._noise: dict[int, Tensor] = {}  # float64 [rows drawn, V]
        if codebooks:
            noise = gumbel_of_frame(vocabulary, self._filters.seeds, self._filters.positions, codebooks)
            self._noise = dict(zip(codebooks, noise.unbind(1), strict=True))

    @torch.inference_mode()
    def __call__(self, logits: Tensor, codebook: int = 0) -> Tensor:
        """Token ids, int64 [B], of logits float32 [B, V]; codebook: as in `sample`."""
        if self._is_greedy:
            return logits.argmax(-1)
        if self._drawn is None:
            return self._draw(logits, codebook)
        tokens = logits.argmax(-1)
        tokens[self._drawn] = self._draw(logits[self._drawn], codebook)
        return tokens

    def _draw(self, logits: Tensor, codebook: int) -> Tensor:
        vocabulary, filters = logits.shape[-1], self._filters
        scaled = logits / filters.temperature
        if self._has_min_p:
            scaled.masked_fill_(scaled < scaled.amax(-1, keepdim=True) + filters.log_min_p, -math.inf)
        if self._limited and len(self._limited[0].rows) == len(logits):
            return self._draw_limited(scaled, self._limited[0], codebook)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for limited in self._limited:
            tokens[limited.rows] = self._draw_limited(scaled[limited.rows], limited, codebook)
        whole = list(self._whole)
        if self._nucleus:
            among = scaled[self._nucleus]
            best = among.topk(min(NUCLEUS_WIDTH, vocabulary))
            some = self._nucleus_filters
            scores = keep_top_p(best.values, among.logsumexp(-1, keepdim=True), some.top_p)
            tokens[self._nucleus] = self._draw_ranked(scores, best.indices, some, self._nucleus, codebook)
            # Where even the last of the best is in the nucleus, others may be too.
            lasts = scores[:, -1].tolist()
            whole += [i for i, last in zip(self._nucleus, lasts, strict=True) if last > -math.inf]
        if whole:
            tokens[whole] = _draw_whole(scaled[whole], filters.select(whole), codebook)
        return tokens

    def _draw_limited(self, scaled: Tensor, limited: _Limited, codebook: int) -> Tensor:
        """Draw, int64 [K], for rows with the same top-k; scaled: [K, V]."""
        best = scaled.topk(limited.top_k)
        scores = keep_top_p(best.values, best.values.logsumexp(-1, keepdim=True), limited.filters.top_p)
        return self._draw_ranked(scores, best.indices, limited.filters, limited.rows, codebook)

    def _draw_ranked(
        self, scores: Tensor, tokens: Tensor, filters: _Filters, rows: list[int], codebook: int
    ) -> Tensor:
        """Draw, int64 [K], for `rows` among tokens [K, R] with scores [K, R]; -inf keeps a token out."""
        if codebook in self._noise:
            of_all = self._noise[codebook]
            noise = (of_all if len(rows) == len(of_all) else of_all[rows]).gather(-1, tokens)
        else:
            noise = gumbel(tokens, filters.seeds, filters.positions, codebook)
        return tokens.gather(-1, (noise + scores).argmax(-1, keepdim=True)).squeeze(-1)


def gumbel(tokens: Tensor, seeds: Tensor, positions: Tensor, codebook: int = 0) -> Tensor:
    """Standard Gumbel noise, float64 [B, K], of tokens int64 [B, K] for seeds and positions int64 [B]."""
    words = _words(tokens >> 2, seeds, positions, codebook)
    return _as_gumbel(words.gather(-1, (tokens & 3).unsqueeze(-1)).squeeze(-1))


def gumbel_of_all(vocabulary: int, seeds: Tensor, positions: Tensor, codebook: int = 0) -> Tensor:
    """`gumbel` of the tokens 0 … vocabulary - 1, float64 [B, V], at a quarter of the price."""
    blocks = torch.arange((vocabulary + 3) // 4, device=seeds.device).expand(len(seeds), -1)
    return _as_gumbel(_words(blocks, seeds, positions, codebook).flatten(1)[:, :vocabulary])


def gumbel_of_frame(
    vocabulary: int, seeds: Tensor, positions: Tensor, codebooks: Sequence[int] | Tensor
) -> Tensor:
    """`gumbel_of_all` for several codebooks at once, float64 [B, codebooks, V]."""
    batch, number = len(seeds), len(codebooks)
    blocks = torch.arange((vocabulary + 3) // 4, device=seeds.device)
    shape = (batch, number, len(blocks))
    counter = (
        blocks.expand(shape),
        positions[:, None, None].expand(shape),
        torch.as_tensor(codebooks, device=seeds.device)[:, None].expand(shape),
        torch.zeros((), dtype=torch.int64, device=seeds.device).expand(shape),
    )
    key = ((seeds & _LOW)[:, None, None], ((seeds >> 32) & _LOW)[:, None, None])
    words = torch.stack(philox(counter, key), dim=-1)
    return _as_gumbel(words.flatten(2)[..., :vocabulary])


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words of a counter of four words and a key of two.

    All are int64 tensors of one broadcast shape that hold unsigned 32-bit values. The product of two words
    wraps in int64, which keeps its bits: the halves are cut out by shift and mask.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((right >> 32) & _LOW) ^ c1 ^ ((k0 + i * _WEYL[0]) & _LOW)
        c2 = ((left >> 32) & _LOW) ^ c3 ^ ((k1 + i * _WEYL[1]) & _LOW)
        c1, c3 = right & _LOW, left & _LOW
    return c0, c1, c2, c3


def _words(blocks: Tensor, seeds: Tensor, positions: Tensor, codebook: int) -> Tensor:
    """The four words, int64 [B, K, 4], of each block of four tokens, int64 [B, K]."""
    seeds, positions = seeds.unsqueeze(-1), positions.unsqueeze(-1)
    counter = (blocks, positions, torch.full_like(positions, codebook), torch.zeros_like(positions))
    return torch.stack(philox(counter, (seeds & _LOW, (seeds >> 32) & _LOW)), dim=-1)


def _as_gumbel(words: Tensor) -> Tensor:
    """Unsigned 32-bit values as Gumbel noise; float64, since float32 rounds the largest uniforms to 1."""
    uniform = (words.double() + 0.5) / 2**32
    return uniform.log_().neg_().log_().neg_()


def _adjust(scores: Tensor, row: Row) -> None:
    """Apply in place what holds for greedy rows too; scores: float32 [V]."""
    penalty = row.sampling.repetition_penalty
    if penalty != 1.0 and row.penalised:
        seen = torch.tensor(row.penalised, device=scores.device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.banned:
        scores[torch.tensor(row.banned, device=scores.device)] = -math.inf


def draw_whole(scaled: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw, int64 [B], for rows without top-k, of scores float32 [B, V] that all but top-p was applied to."""
    return _draw_whole(scaled, _Filters.of(rows, scaled.device), codebook=0)


def _draw_whole(scaled: Tensor, filters: _Filters, codebook: int) -> Tensor:
    """Draw, int64 [B], among all tokens that top-p leaves of scaled logits [B, V]."""
    if (filters.top_p < 1.0).any():
        ranked = scaled.sort(descending=True).values
        kept = keep_top_p(ranked, ranked.logsumexp(-1, keepdim=True), filters.top_p)
        least = kept.masked_fill(kept == -math.inf, math.inf).amin(-1, keepdim=True)
        scaled = scaled.masked_fill(scaled < least, -math.inf)
    noise = gumbel_of_all(scaled.shape[-1], filters.seeds, filters.positions, codebook)
    return (noise + scaled).argmax(-1)


def keep_top_p(scores: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
    """Scores [B, K], in falling order, without those that begin beyond the mass `top_p` of exp(log_total)."""
    mass = (scores - log_total).exp().cumsum(-1)
    before = F.pad(mass[:, :-1], (1, 0))
    # Without a limit the sum may still round to 1 before the last token.
    return scores.masked_fill((before >= top_p) & (top_p < 1.0), -math.inf)


@dataclass(frozen=True)
class _Filters:
    """Settings of B rows as tensors."""

    temperature: Tensor  # float32 [B, 1]
    log_min_p: Tensor  # float32 [B, 1]; -inf without min-p
    top_p: Tensor  # float32 [B, 1]
    seeds: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> _Filters:
        settings = [row.sampling for row in rows]

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, device=device).unsqueeze(-1)

        return cls(
            temperature=column([s.temperature for s in settings]),
            log_min_p=column([math.log(s.min_p) if s.min_p else -math.inf for s in settings]),
            top_p=column([s.top_p for s in settings]),
            seeds=torch.tensor([s.seed or 0 for s in settings], device=device),
            positions=torch.tensor([row.position for row in rows], device=device),
        )

    def select(self, rows: Sequence[int]) -> _Filters:
        return _Filters(**{name: values[rows] for name, values in vars(self).items()})


@dataclass(frozen=True)
class _Limited:
    """Rows with the same top-k."""

    top_k: int
    rows: list[int]  # among those that are drawn
    filters: _Filters
