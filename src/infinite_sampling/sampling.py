"""Logits and counter-based noise -> the next token of every row, and its log-probabilities.

In: float32 logits (R, V) and the identity of each row: prompt key, member key, position t.
Out: `SampledTokens`. Deliberately ignorant of models, slots, schedules and of when a completion ends.

The noise is a pure function of (seed, prompt key, member key, t, v), so a draw depends on its own
row alone, and its bits do not depend on how many rows there are or where the row stands: every
floating-point sum runs over one row's blocks of 64 columns, then over the blocks in float64.

A plain Gumbel-max over the vocabulary would need V noises a row. The tree here gives the same law
with 64: the most likely tokens stand for themselves, all others together stand as one lump with the
log of their summed weight as its logit, since the largest of logit_i + G_i over a set is distributed
as log(sum exp logit_i) + G. When the lump wins, its block of 64 columns is drawn the same way, then
the token inside the block; each level has noise of its own. A change of the logits by at most e
changes the token with a probability of order e, as for the plain Gumbel-max.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from infinite_sampling import native
from infinite_sampling.config import SamplingConfig
from infinite_sampling.philox import philox_4x32_10

MAX_TEMPORARY_BYTES = 64 * 2**20
"""Rows are processed in pieces whose temporaries stay within this (one row at the least)."""

BLOCK_TOKENS = 64
"""Columns in a block of the vocabulary; part of the definition of the noise."""
NUM_CANDIDATES = 64
"""The lump and the at most 63 tokens more likely than the 64th; part of the definition of the noise."""

# Noise is addressed by v in [0, 2**34), four to a Philox counter: tokens, then blocks, then the lump.
_BLOCK_ADDRESS = 2**33
_LUMP_ADDRESS = 2**34 - 4

_NUCLEUS_TOKENS = 1024
"""Most likely tokens searched for the end of the nucleus before a whole row is sorted."""


class SampledTokens(NamedTuple):
    """What `Sampler.sample` returns: three tensors of shape (R,)."""

    token_ids: Tensor
    """int64, in [0, V)."""
    logprobs: Tensor
    """float32, nats: log-softmax of the logits as given at the temperature (at 1 when greedy)."""
    sampling_logprobs: Tensor
    """float32, nats: of the law drawn from, after penalty and filters; when greedy, log-softmax at
    temperature 1 of the logits whose largest was taken."""


class Streams(NamedTuple):
    """The noise of R rows; each tensor (R, 1) int64 in [0, 2**32)."""

    seed: int
    prompt_keys: Tensor
    member_keys: Tensor
    positions: Tensor

    def gumbel(self, v: Tensor) -> Tensor:
        """Standard Gumbel noise (R, N) float64 at the addresses v, (R, N) or (1, N) int64.

        Word v mod 4 of Philox at counter (v div 4, t, member key, prompt key) under the key (low, high
        half of the seed) gives u = (word + 0.5) / 2**32 and the noise -log(-log u), at most 22.9.
        """
        if native.supports(v.device, torch.float32):
            word = native.philox_words(v, self.positions, self.member_keys, self.prompt_keys, self.seed)
        else:
            counter = torch.stack(torch.broadcast_tensors(v >> 2, self.positions, self.member_keys, self.prompt_keys))
            words = philox_4x32_10(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32))
            word = words.gather(0, (v & 3).expand(counter.shape[1:]).unsqueeze(0)).squeeze(0)
        return word.double().add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()

    def rows(self, index: Tensor | slice) -> Streams:
        """The streams of some rows."""
        return Streams(self.seed, self.prompt_keys[index], self.member_keys[index], self.positions[index])


class Sampler:
    """Draws tokens by one `SamplingConfig`. Holds no state: equal arguments give equal bits.

    `eos_token_ids` are the tokens withheld while t < `min_new_tokens`; those outside the vocabulary
    are ignored, as transformers does. Needs a device with float64.
    """

    def __init__(self, config: SamplingConfig, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, got {vocab_size}")
        self.config = config
        self.vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        # Floats and, when filtering, sorted values and their indices: bytes of temporaries a column.
        self._bytes_per_logit = 40 if config.has_filters or config.min_new_tokens else 12

    def sample(
        self, logits: Tensor, prompt_keys: Tensor, member_keys: Tensor, positions: Tensor, seen: Tensor | None = None
    ) -> SampledTokens:
        """One token for every row.

        Args:
            logits: (R, V) float32, not changed. A row with NaN or +inf, or all -inf, gets logprobs of NaN.
            prompt_keys, member_keys, positions: (R,) int64 in [0, 2**32); a position counts the
                member's own tokens before this one.
            seen: (R, V) bool, the tokens in the row's prompt or completion; only for a repetition penalty.

        Raises:
            ValueError: on a wrong shape, or `seen` missing under a repetition penalty.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            raise ValueError(f"logits must have shape (rows, {self.vocab_size}), got {tuple(logits.shape)}")
        if self.config.repetition_penalty != 1.0 and (seen is None or seen.shape != logits.shape):
            raise ValueError(f"a repetition penalty needs `seen`, a bool mask of shape {tuple(logits.shape)}")
        streams = Streams(self.config.seed, prompt_keys[:, None], member_keys[:, None], positions[:, None])
        rows = max(1, MAX_TEMPORARY_BYTES // (self.vocab_size * self._bytes_per_logit))
        pieces = [
            self._sample_rows(logits[i : i + rows].float(), streams.rows(slice(i, i + rows)), _piece(seen, i, rows))
            for i in range(0, max(1, len(logits)), rows)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return SampledTokens(*(torch.cat(column) for column in zip(*pieces, strict=True)))

    def _sample_rows(self, raw: Tensor, streams: Streams, seen: Tensor | None) -> SampledTokens:
        """`sample` for a piece of the rows."""
        config = self.config
        early = self._early(streams)
        scores = self._penalised(raw, early, seen)
        if config.temperature == 0:
            tokens = scores.argmax(-1)
            logprobs = log_probs(raw, 1.0, tokens)
            return SampledTokens(tokens, logprobs, logprobs if scores is raw else log_probs(scores, 1.0, tokens))
        if config.has_filters:
            tokens, drawn = draw(_filtered(scores / config.temperature, config), 1.0, streams)
            return SampledTokens(tokens, log_probs(raw, config.temperature, tokens), drawn)
        tokens, drawn = draw(scores, config.temperature, streams)
        if early is None:
            return SampledTokens(tokens, drawn, drawn)
        logprobs = log_probs(raw, config.temperature, tokens)
        return SampledTokens(tokens, torch.where(early, logprobs, drawn), drawn)

    def _early(self, streams: Streams) -> Tensor | None:
        """(R,) bool, the rows that may not end yet; None if there is none."""
        if not self._eos or not self.config.min_new_tokens:
            return None
        early = streams.positions[:, 0] < self.config.min_new_tokens
        return early if bool(early.any()) else None

    def _penalised(self, raw: Tensor, early: Tensor | None, seen: Tensor | None) -> Tensor:
        """(R, V) logits after the repetition penalty and with EOS withheld; `raw` itself if neither applies."""
        scores = raw
        penalty = self.config.repetition_penalty
        if penalty != 1.0 and seen is not None:
            scores = torch.where(seen, torch.where(raw < 0, raw * penalty, raw / penalty), raw)
        if early is not None:
            scores = scores.clone() if scores is raw else scores
            for token in self._eos:
                scores[:, token].masked_fill_(early, -math.inf)
        return scores


def draw(logits: Tensor, temperature: float, streams: Streams) -> tuple[Tensor, Tensor]:
    """A token (R,) int64 from softmax(logits (R, V) / temperature), and its log-probability (R,) float32."""
    blocks = _blocks(logits)
    block_max, top, weights = _softmax_weights(blocks, temperature)
    values, candidates = _largest(blocks, block_max)
    # Ties with the last value all go to the lump, so that the candidates are a set that no tie-break decides.
    is_candidate = values > values[:, -1:]
    scaled = (values.double() - top[:, None].double()) / temperature
    rest = weights.flatten(1)
    rest.scatter_(1, candidates, rest.gather(1, candidates).masked_fill_(is_candidate, 0.0))
    block_mass = weights.sum(-1)
    lump_mass = block_mass.sum(-1, dtype=torch.float64)
    total = lump_mass + torch.where(is_candidate, scaled, -math.inf).exp().sum(-1)

    scores = torch.where(is_candidate, scaled, -math.inf)
    scores[:, -1] = lump_mass.log()
    addresses = candidates.clone()
    addresses[:, -1] = _LUMP_ADDRESS
    best = (scores + streams.gumbel(addresses)).argmax(-1, keepdim=True)
    tokens = candidates.gather(1, best)[:, 0]
    lumped = (best[:, 0] == NUM_CANDIDATES - 1).nonzero()[:, 0]
    if len(lumped):
        tokens[lumped] = _draw_lumped(weights[lumped], block_mass[lumped], streams.rows(lumped))
    tokens.clamp_(max=logits.shape[1] - 1)  # a row of NaN or of -inf may have picked the padding
    chosen = (logits.gather(1, tokens[:, None])[:, 0].double() - top.double()) / temperature
    return tokens, (chosen - total.log()).float()


def log_probs(logits: Tensor, temperature: float, tokens: Tensor) -> Tensor:
    """(R,) float32: log-softmax of logits (R, V) / temperature at tokens (R,)."""
    _, top, weights = _softmax_weights(_blocks(logits), temperature)
    total = weights.sum(-1).sum(-1, dtype=torch.float64)
    chosen = (logits.gather(1, tokens[:, None])[:, 0].double() - top.double()) / temperature
    return (chosen - total.log()).float()


def _draw_lumped(weights: Tensor, block_mass: Tensor, streams: Streams) -> Tensor:
    """A token (R,) in proportion to weights (R, B, 64) with sums block_mass (R, B): its block, then itself."""
    blocks = torch.arange(block_mass.shape[1], device=weights.device)
    block = (block_mass.double().log() + streams.gumbel(_BLOCK_ADDRESS + blocks[None])).argmax(-1, keepdim=True)
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, BLOCK_TOKENS))[:, 0]
    tokens = block * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=weights.device)
    best = (inside.double().log() + streams.gumbel(tokens)).argmax(-1, keepdim=True)
    return tokens.gather(1, best)[:, 0]


def _blocks(logits: Tensor) -> Tensor:
    """(R, V) -> (R, B, 64), a view where 64 divides V, else a copy padded with -inf."""
    padding = -logits.shape[1] % BLOCK_TOKENS
    logits = pad(logits, (0, padding), value=-math.inf) if padding else logits
    return logits.unflatten(1, (-1, BLOCK_TOKENS))


def _softmax_weights(blocks: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """From (R, B, 64): the maxima (R, B) and (R,), and exp((x - max) / temperature) (R, B, 64), at most 1."""
    block_max = blocks.amax(-1)
    top = block_max.amax(-1)
    if native.supports(blocks.device, blocks.dtype):
        return block_max, top, native.softmax_weights(blocks, top, temperature)
    weights = blocks - top[:, None, None]
    if temperature != 1.0:
        weights /= temperature
    return block_max, top, weights.exp_()


def _largest(blocks: Tensor, block_max: Tensor) -> tuple[Tensor, Tensor]:
    """The 64 largest of (R, B, 64), descending, with their columns: both (R, 64).

    They lie in the 64 blocks with the largest maxima: a value above the 64th largest is in a block
    whose maximum is too, and there are at most 63 of those.
    """
    rows, num_blocks, _ = blocks.shape
    if num_blocks <= NUM_CANDIDATES:
        return blocks.flatten(1).topk(NUM_CANDIDATES)
    chosen = block_max.topk(NUM_CANDIDATES, sorted=False).indices
    offsets = torch.arange(rows, device=blocks.device)[:, None] * num_blocks
    pool = blocks.flatten(0, 1).index_select(0, (offsets + chosen).flatten()).view(rows, -1)
    values, index = pool.topk(NUM_CANDIDATES)
    return values, chosen.gather(1, index // BLOCK_TOKENS) * BLOCK_TOKENS + index % BLOCK_TOKENS


def _filtered(scores: Tensor, config: SamplingConfig) -> Tensor:
    """Tempered scores (R, V) with -inf outside top-k, then outside top-p, then below min-p.

    As transformers' TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper, one after another, except
    that top-p too keeps all ties with the last token it keeps, whatever the order of sorting.
    """
    if config.top_k:
        kth = scores.topk(min(config.top_k, scores.shape[1])).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if config.top_p < 1.0:
        scores = scores.masked_fill(scores < _nucleus_end(scores, config.top_p), -math.inf)
    if config.min_p:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(config.min_p), -math.inf)
    return scores


def _nucleus_end(scores: Tensor, top_p: float) -> Tensor:
    """(R, 1): the smallest score of the fewest largest whose probability reaches top_p (one at the least)."""
    _, top, weights = _softmax_weights(_blocks(scores), 1.0)
    wanted = top_p * weights.sum(-1).sum(-1, dtype=torch.float64)

    def end(values: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        mass = (values.double() - top[rows, None].double()).exp().cumsum(-1)
        num_kept = 1 + (mass[:, :-1] < wanted[rows, None]).sum(-1, keepdim=True)
        return values.gather(1, num_kept - 1), mass[:, -1] < wanted[rows]

    ends, unreached = end(scores.topk(min(_NUCLEUS_TOKENS, scores.shape[1])).values, slice(None))
    wide = unreached.nonzero()[:, 0]
    if len(wide) and scores.shape[1] > _NUCLEUS_TOKENS:
        ends[wide] = end(scores[wide].sort(descending=True).values, wide)[0]
    return ends


def _piece(seen: Tensor | None, start: int, rows: int) -> Tensor | None:
    return None if seen is None else seen[start : start + rows]
