"""A pseudo-random order of any number of things in no memory: a small cipher on the index."""

import numpy as np
from jaxtyping import Int, UInt64

# With 8 rounds the positions of domains as small as 3 are evenly spread over keys (tests/data/test_shuffle.py).
_ROUNDS = 8


def mix(value: UInt64[np.ndarray, " B"]) -> UInt64[np.ndarray, " B"]:
    """A bijective hash of 64 bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permute(index: Int[np.ndarray, " B"], size: int, key: UInt64[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Where each index goes in a shuffle of range(size); the key of an entry chooses the shuffle.

    For one key this is a bijection of range(size): a Feistel network permutes the next larger power of four, and a value
    that falls outside is permuted again until it falls inside ("cycle walking", Black and Rogaway 2002; under four rounds on average).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _encrypt(index.astype(np.uint64), key, half_bits)
    while (outside := value >= np.uint64(size)).any():
        value[outside] = _encrypt(value[outside], key[outside], half_bits)
    return value.astype(np.int64)


def _encrypt(value: UInt64[np.ndarray, " B"], key: UInt64[np.ndarray, " B"], half_bits: int) -> UInt64[np.ndarray, " B"]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for _ in range(_ROUNDS):
        key = mix(key)
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << bits) | right
