"""Philox 4x32-10, a counter-based random generator, in torch integer arithmetic.

In: counters and a key. Out: four random 32-bit words for each counter, a pure function of both on
every device. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), where ten rounds pass BigCrush.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10


def philox_4x32_10(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Four random words for each counter, in words of 32 bits held in int64.

    Args:
        counter: (4, ...) int64, each word in [0, 2**32).
        key: two ints in [0, 2**32).

    Returns:
        (4, ...) int64, each word in [0, 2**32).
    """
    shape = (2, *(1,) * (counter.ndim - 1))
    # Each round's two key words, swapped: the halves meet them in the order (1, 0).
    schedule = [[(key[i] + r * _KEY_INCREMENTS[i]) & _WORD for i in (1, 0)] for r in range(_NUM_ROUNDS)]
    multipliers, *round_keys = torch.tensor([_MULTIPLIERS, *schedule], device=counter.device).view(-1, *shape)
    even, odd = counter[0::2], counter[1::2].flip(0)  # words (0, 2) and (3, 1)
    for round_key in round_keys:
        # The product wraps modulo 2**64 and the shift copies its sign bit: the low 32 bits of both halves are right.
        product = even * multipliers
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(_WORD).flip(0)
        odd = product.bitwise_and_(_WORD)
    return torch.stack((even[0], odd[1], even[1], odd[0]))
