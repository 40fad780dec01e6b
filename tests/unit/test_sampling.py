"""The sampler: its law, its bits, its log-probabilities, its filters."""

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from infinite_sampling import sampling
from infinite_sampling.config import SamplingConfig
from infinite_sampling.philox import philox_4x32_10
from infinite_sampling.sampling import Sampler, Streams

NUM_DRAWS = 20_000
EOS = (1, 4)


def random_logits(rows, vocab, scale=2.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def keys(rows, seed=1):
    """Prompt keys, member keys and positions (R,) that differ between rows."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 2**32, (rows,), generator=generator) for _ in range(3))


def draw_many(config, row, *, rows=NUM_DRAWS, seen=None, position=None):
    """Draws from one row of logits: members 0..99 at positions 0, 1, ... unless a position is given."""
    index = torch.arange(rows)
    positions = index // 100 if position is None else torch.full_like(index, position)
    members = index % 100 if position is None else index
    mask = None if seen is None else seen.expand(rows, -1)
    sampler = Sampler(config, EOS, row.shape[-1])
    return sampler.sample(row.expand(rows, -1), torch.full_like(index, 5), members, positions, mask)


def same_bits(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def chi_square_p(tokens, probs):
    """p-value of the counts of tokens under probs (V,); cells expected below 5 are pooled."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    expected = probs.double() * len(tokens)
    small = expected < 5
    pooled = [torch.stack((x[small].sum(), *x[~small])) for x in (counts, expected)]
    cells = [x[pooled[1] > 0] for x in pooled]
    if len(cells[0]) == 1:
        return 1.0
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    return torch.special.gammaincc(torch.tensor((len(cells[0]) - 1) / 2.0).double(), statistic / 2).item()


def hf_scores(config, logits, seen=None, position=0):
    """The scores that transformers' own processors make of logits (R, V)."""
    scores = logits.clone()
    if seen is not None:
        for row in range(len(scores)):
            ids = seen[row].nonzero().T
            scores[row : row + 1] = hf.RepetitionPenaltyLogitsProcessor(config.repetition_penalty)(
                ids, scores[row : row + 1]
            )
    ids = torch.zeros(len(scores), position, dtype=torch.int64)
    scores = hf.MinNewTokensLengthLogitsProcessor(0, config.min_new_tokens, list(EOS))(ids, scores)
    warpers = [hf.TemperatureLogitsWarper(float(config.temperature))]
    if config.top_k:
        warpers.append(hf.TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(config.top_p))
    if config.min_p:
        warpers.append(hf.MinPLogitsWarper(config.min_p))
    for warper in warpers:
        scores = warper(ids, scores)
    return scores


LAWS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 3},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8, "min_new_tokens": 2},
]


@pytest.mark.parametrize("settings", LAWS, ids=str)
def test_draws_follow_the_law_of_transformers_processors(settings):
    config = SamplingConfig(seed=11, **settings)
    row = random_logits(1, 12, scale=1.5)
    seen = torch.arange(12)[None] % 3 == 0 if config.repetition_penalty != 1 else None
    drawn = draw_many(config, row, seen=seen, position=1)
    probs = hf_scores(config, row, seen, position=1).softmax(-1)[0]
    assert chi_square_p(drawn.token_ids, probs) > 0.001


@pytest.mark.parametrize(("vocab", "scale"), [(64, 0.5), (300, 1.0), (5000, 0.0), (5000, 0.3)])
def test_draws_follow_the_softmax_where_the_lump_wins_often(vocab, scale):
    row = random_logits(1, vocab, scale=scale, seed=vocab)
    tokens = draw_many(SamplingConfig(seed=3), row).token_ids
    probs = row.double().softmax(-1)[0]
    lumped = probs <= probs.topk(64).values[-1]
    assert lumped[tokens].any()
    for bucket in (torch.arange(vocab) // 50, torch.arange(vocab) % 64, torch.arange(vocab) % 97, lumped.long()):
        bucket_probs = torch.zeros(int(bucket.max()) + 1).double().index_add(0, bucket, probs)
        assert chi_square_p(bucket[tokens], bucket_probs) > 0.001


@pytest.mark.parametrize("lag", [1, 100], ids=["siblings", "positions"])
def test_neighbouring_draws_are_independent(lag):
    tokens = draw_many(SamplingConfig(seed=8), torch.zeros(1, 6)).token_ids
    pairs = (tokens[:-lag] * 6 + tokens[lag:])[:: 2 if lag == 1 else 1]
    assert chi_square_p(pairs, torch.full((36,), 1 / 36)) > 0.001
    values = torch.stack((tokens[:-lag], tokens[lag:])).double()
    assert abs(torch.corrcoef(values)[0, 1]) < 4 / math.sqrt(NUM_DRAWS)


def test_every_part_of_the_identity_and_both_halves_of_the_seed_name_another_stream():
    row, index = torch.zeros(1, 50), torch.full((200,), 3)
    logits, count = row.expand(200, -1), torch.arange(200)

    def tokens(seed=0, prompt=index, member=index):
        return Sampler(SamplingConfig(seed=seed), (), 50).sample(logits, prompt, member, count).token_ids

    base = tokens()
    for other in (tokens(seed=1), tokens(seed=2**32), tokens(prompt=index + 1), tokens(member=index + 1)):
        assert (base == other).float().mean() < 0.1


def test_noise_is_the_documented_function_of_seed_keys_position_and_token():
    prompt, member, position = keys(3)
    seed = 0x0123456789ABCDEF
    v = torch.tensor([[0, 1, 2, 3, 4, 49151, 2**33 + 5, 2**34 - 4]])
    noise = Streams(seed, prompt[:, None], member[:, None], position[:, None]).gumbel(v)
    for row in range(3):
        for column, token in enumerate(v[0].tolist()):
            counter = [token >> 2, int(position[row]), int(member[row]), int(prompt[row])]
            word = philox_4x32_10(torch.tensor(counter), (0x89ABCDEF, 0x01234567))[token & 3].item()
            expected = -math.log(-math.log((word + 0.5) / 2**32))
            assert noise[row, column].item() == pytest.approx(expected, rel=1e-12)


def token_by_definition(row, streams):
    """The tree of the module's docstring for one row of logits, in float64, written plainly."""

    def largest(logits_by_address):
        addresses = torch.tensor([list(logits_by_address)])
        logits = torch.tensor(list(logits_by_address.values())).double()
        return addresses[0, (logits + streams.gumbel(addresses)[0]).argmax()].item()

    limit = sorted(row)[-64]
    heads = {v: x for v, x in enumerate(row) if x > limit}
    rest = {v: x for v, x in enumerate(row) if x <= limit}
    lump = math.log(sum(map(math.exp, rest.values())))
    first = largest(heads | {2**34 - 4: lump})
    if first in heads:
        return first
    masses: dict[int, float] = {}
    for v, x in rest.items():
        masses[v // 64] = masses.get(v // 64, 0.0) + math.exp(x)
    block = largest({2**33 + b: math.log(mass) for b, mass in masses.items()}) - 2**33
    return largest({v: x for v, x in rest.items() if v // 64 == block})


@pytest.mark.parametrize("vocab", [64, 1000, 5003])
@pytest.mark.parametrize("rounding", [None, 0.25], ids=["no ties", "many ties"])
def test_tokens_are_those_of_the_definition(vocab, rounding):
    logits, (prompt, member, position) = random_logits(40, vocab, scale=1.0), keys(40)
    if rounding:
        logits = (logits / rounding).round() * rounding
    tokens = Sampler(SamplingConfig(seed=77), (), vocab).sample(logits, prompt, member, position).token_ids
    streams = Streams(77, prompt[:, None], member[:, None], position[:, None])
    expected = [token_by_definition(logits[i].tolist(), streams.rows(slice(i, i + 1))) for i in range(40)]
    assert tokens.tolist() == expected


BIT_CASES = [(v, {}) for v in (7, 64, 1000, 49152, 50257)] + [
    (1000, {"temperature": 0.7}),
    (1000, {"temperature": 0}),
    (1000, {"min_new_tokens": 2**31}),
    (5000, {"temperature": 0.9, "top_k": 2000, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.2}),
]


@pytest.mark.parametrize(("vocab", "settings"), BIT_CASES, ids=str)
def test_bits_of_a_row_depend_neither_on_the_other_rows_nor_on_where_it_stands(vocab, settings, monkeypatch):
    settings = settings | {"max_new_tokens": max(256, settings.get("min_new_tokens", 0))}
    sampler, logits, named = Sampler(SamplingConfig(**settings), EOS, vocab), random_logits(64, vocab), keys(64)
    seen = random_logits(64, vocab, seed=9) > 2 if "repetition_penalty" in settings else None

    def sample(index):
        mask = None if seen is None else seen[index].clone()
        return sampler.sample(logits[index].clone(), *(key[index] for key in named), mask)

    def assert_equal(result, index):
        assert same_bits(result, [column[index] for column in whole])

    whole = sample(slice(None))
    for rows in range(1, 65):
        start = (rows * 7) % (65 - rows)
        assert_equal(sample(slice(start, start + rows)), slice(start, start + rows))
    for seed in range(3):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        assert_equal(sample(order), order)
    monkeypatch.setattr(sampling, "MAX_TEMPORARY_BYTES", vocab * 200)
    assert_equal(sample(slice(None)), slice(None))


def test_bits_do_not_depend_on_the_number_of_threads():
    sampler, logits, named = Sampler(SamplingConfig(), (), 49152), random_logits(24, 49152, scale=3), keys(24)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = sampler.sample(logits, *named)
        for num_threads, rows in ((2, 1), (2, 24), (3, 8)):  # a lone row is where a sum may be split over threads
            torch.set_num_threads(num_threads)
            for start in range(0, 24, rows):
                piece = slice(start, start + rows)
                result = sampler.sample(logits[piece], *(key[piece] for key in named))
                assert same_bits(result, [column[piece] for column in whole])
    finally:
        torch.set_num_threads(threads)


def test_noise_of_rounding_size_on_the_logits_changes_next_to_no_token():
    vocab = 2000
    row = -1.2 * torch.arange(1, vocab + 1).log()[torch.randperm(vocab, generator=torch.Generator().manual_seed(2))]
    first, second = (
        draw_many(SamplingConfig(seed=1), row + 1e-5 * random_logits(1, vocab, scale=1, seed=s)) for s in (1, 2)
    )
    assert len(first.token_ids.unique()) > 500
    assert (first.token_ids != second.token_ids).float().mean() < 1e-4


@pytest.mark.parametrize("temperature", [0, 0.3, 1, 2.5])
@pytest.mark.parametrize("vocab", [7, 1000, 5000])
def test_both_logprobs_are_the_log_softmax_at_the_temperature_without_filters(vocab, temperature):
    logits = random_logits(50, vocab, scale=3)
    before = logits.clone()
    drawn = Sampler(SamplingConfig(temperature=temperature), (), vocab).sample(logits, *keys(50))
    expected = (logits.double() / (temperature or 1)).log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(drawn.logprobs, drawn.sampling_logprobs)
    assert torch.equal(logits, before)
    assert (drawn.token_ids.dtype, drawn.logprobs.dtype) == (torch.int64, torch.float32)


FILTERS = [settings for settings in LAWS if settings.keys() - {"temperature"}] + [
    {"top_p": 1e-9},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 1.0},
    {"top_k": 10**6},
    {"top_k": 40, "top_p": 0.8},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_filters_leave_the_tokens_that_transformers_processors_leave(settings):
    config, vocab = SamplingConfig(**settings), 3000
    logits = random_logits(20, vocab, scale=2.5)
    seen = random_logits(20, vocab, seed=4) > 1 if config.repetition_penalty != 1 else None
    sampler, (prompt, member, _) = Sampler(config, EOS, vocab), keys(20)
    position = torch.ones(20, dtype=torch.int64)
    expected = hf_scores(config, logits, seen, position=1)
    early = position < config.min_new_tokens if config.min_new_tokens else None
    ours = sampling._filtered(sampler._penalised(logits, early, seen) / config.temperature, config)
    assert torch.equal(ours.isinf(), expected.isinf())
    drawn = sampler.sample(logits, prompt, member, position, seen)
    tokens = drawn.token_ids[:, None]
    torch.testing.assert_close(drawn.sampling_logprobs, expected.log_softmax(-1).gather(1, tokens)[:, 0])
    raw = (logits / config.temperature).log_softmax(-1).gather(1, tokens)[:, 0]
    torch.testing.assert_close(drawn.logprobs, raw)


def test_min_new_tokens_leaves_the_bits_of_the_rows_it_does_not_bite():
    logits, (prompt, member, _) = random_logits(40, 100, scale=0.5), keys(40)
    logits[:, list(EOS)] += 5.0
    positions = torch.arange(40) % 4
    free = Sampler(SamplingConfig(), EOS, 100).sample(logits, prompt, member, positions)
    held = Sampler(SamplingConfig(min_new_tokens=2), (*EOS, 12345), 100).sample(logits, prompt, member, positions)
    early = positions < 2
    assert same_bits([a[~early] for a in free], [a[~early] for a in held])
    assert not torch.isin(held.token_ids[early], torch.tensor(EOS)).any()
    assert torch.isin(free.token_ids[early], torch.tensor(EOS)).any()
    assert (held.sampling_logprobs[early] > held.logprobs[early] + 0.1).all()


def test_greedy_takes_the_largest_after_penalty_and_withheld_eos():
    logits = torch.tensor([[3.0, 9.0, 4.0, 3.9, 8.0]]).repeat(2, 1)
    seen = torch.tensor([[False, False, True, False, False]]).repeat(2, 1)
    config = SamplingConfig(temperature=0, repetition_penalty=1.1, min_new_tokens=1, top_k=1)
    zero = torch.zeros(2, dtype=torch.int64)
    drawn = Sampler(config, EOS, 5).sample(logits, zero, zero, torch.tensor([0, 1]), seen)
    assert drawn.token_ids.tolist() == [3, 1]
    torch.testing.assert_close(drawn.logprobs, logits.log_softmax(-1)[[0, 1], [3, 1]])
    scores = logits.clone()
    scores[:, 2] /= 1.1
    scores[0, list(EOS)] = -math.inf
    torch.testing.assert_close(drawn.sampling_logprobs, scores.log_softmax(-1)[[0, 1], [3, 1]])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_bad_logits_give_nan_in_their_own_row_only(settings, bad):
    logits = random_logits(3, 5003)
    sampler = Sampler(SamplingConfig(**settings), (), 5003)
    clean = sampler.sample(logits, *keys(3))
    if bad == "all -inf":
        logits[1] = -math.inf
    else:
        logits[1, 70] = bad
    drawn = sampler.sample(logits, *keys(3))
    assert drawn.logprobs.isnan().tolist() == drawn.sampling_logprobs.isnan().tolist() == [False, True, False]
    assert (drawn.token_ids >= 0).all() and (drawn.token_ids < 5003).all()
    assert same_bits([a[[0, 2]] for a in drawn], [a[[0, 2]] for a in clean])


def test_a_row_of_equal_logits_and_a_row_with_one_finite_logit_are_drawn():
    logits = torch.zeros(2, 200)
    logits[1] = -math.inf
    logits[1, 150] = -3.0
    drawn = Sampler(SamplingConfig(), (), 200).sample(logits, *keys(2))
    assert drawn.token_ids[1] == 150
    torch.testing.assert_close(drawn.logprobs, torch.tensor([-math.log(200), 0.0]))


def test_no_rows_give_no_tokens():
    drawn = Sampler(SamplingConfig(), (), 100).sample(torch.zeros(0, 100), *keys(0))
    assert [len(column) for column in drawn] == [0, 0, 0]


def test_wrong_shapes_and_a_missing_mask_are_refused():
    with pytest.raises(ValueError, match=r"\(rows, 10\), got \(2, 9\)"):
        Sampler(SamplingConfig(), (), 10).sample(torch.zeros(2, 9), *keys(2))
    with pytest.raises(ValueError, match="needs `seen`"):
        Sampler(SamplingConfig(repetition_penalty=1.1), (), 9).sample(torch.zeros(2, 9), *keys(2))
    with pytest.raises(ValueError, match="vocab_size"):
        Sampler(SamplingConfig(), (), 0)
