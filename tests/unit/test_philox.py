"""Philox 4x32-10 against its published vectors and against the definition in plain integers."""

import pytest
import torch

from infinite_sampling.philox import philox_4x32_10

# Lines "philox4x32 10" of the file kat_vectors in the Random123 distribution: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox_in_plain_integers(counter: list[int], key: tuple[int, int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    low, high = words(key)
    assert philox_4x32_10(torch.tensor(words(counter)), (low, high)).tolist() == words(expected)
    assert philox_in_plain_integers(words(counter), (low, high)) == words(expected)


def test_philox_agrees_with_plain_integers_on_random_counters_of_any_shape():
    generator = torch.Generator().manual_seed(0)
    counter = torch.randint(0, 2**32, (4, 5, 40), generator=generator)
    counter[:, 0, :2] = torch.tensor([0, 2**32 - 1])  # products that need the sign bit
    key = (0xDEADBEEF, 0xFFFFFFFF)
    result = philox_4x32_10(counter, key)
    assert result.shape == counter.shape
    expected = [philox_in_plain_integers(c, key) for c in counter.flatten(1).T.tolist()]
    assert result.flatten(1).T.tolist() == expected
