"""Attention's pieces: exact against a plain softmax, and no bit depends on the rest of the batch."""

from __future__ import annotations

import pytest
import torch

from infinite_sampling import linear, segments
from infinite_sampling.segments import ScoreRule, _segment_rows, attend_prompt, attend_segment, merge_segments

RULE = ScoreRule(0.125, None, None)


def random_segments(rows: int, count: int, heads: int = 9, dim: int = 64, keys: int = 32):
    torch.manual_seed(count)
    query = torch.randn(rows, heads, 1, dim)
    keys_N, values_N = (torch.randn(rows * count, heads, keys, dim) for _ in range(2))
    out, lse = attend_segment(query.repeat_interleave(count, 0), keys_N, values_N, None, RULE)
    return query, keys_N, values_N, out.squeeze(2), lse.squeeze(2)


def test_merged_segments_are_the_softmax_over_all_keys():
    rows, count = 4, 8
    query, keys, values, out, lse = random_segments(rows, count)
    index = torch.arange(rows * count).view(rows, count)
    merged = merge_segments(out, lse, index, torch.zeros(rows, count, 1, dtype=torch.bool))
    whole = [t.view(rows, count, 9, 32, 64).transpose(1, 2).reshape(rows, 9, -1, 64) for t in (keys, values)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *whole, scale=0.125).squeeze(2)
    assert torch.allclose(merged, expected, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_a_row_has_the_same_bits_beside_a_longer_one(heads):
    for count in range(1, 40):
        _, _, _, out, lse = random_segments(4, count, heads, dim=16)
        merged = []
        for length in range(-(-count // 4) * 4, 64, 4):
            index = torch.zeros(4, length, dtype=torch.long)
            index[:, :count] = torch.arange(4 * count).view(4, count)
            hidden = (torch.arange(length) >= count)[None, :, None].expand(4, -1, 1)
            merged.append(merge_segments(out, lse, index, hidden))
        assert all(torch.equal(merged[0], other) for other in merged)


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.log])
@pytest.mark.parametrize("threads", [1, 2])
def test_elementwise_results_do_not_depend_on_the_place(function, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.rand(70_001) * 4 + 0.1
        whole = function(x)
        for start, stop in ((0, 1), (3, 50), (60_000, 70_001)):
            assert torch.equal(function(x[start:stop]), whole[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("native", [False, linear.has_native_bfloat16()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "tokens"), [(3, 64, 76), (7, 64, 131), (4, 128, 300)])
def test_a_prompt_segment_has_the_same_bits_for_every_number_of_rows(monkeypatch, native, dtype, heads, dim, tokens):
    monkeypatch.setattr(segments, "has_native_bfloat16", lambda: native)
    torch.manual_seed(0)
    query = torch.randn(1, 2, 96 * heads + 64, dim).to(dtype) * 2
    keys, values = (torch.randn(1, 2, tokens, dim).to(dtype) for _ in range(2))
    results = []
    for rows in range(1, 65):
        length = _segment_rows(rows, heads, dtype == torch.bfloat16) * heads
        out, lse = attend_prompt(query[:, :, :length], keys, values, None, RULE)
        results.append((out[:, :, : 4 * heads], lse[:, :, : 4 * heads]))
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)
