"""Which partition a key belongs to: Kafka's default partitioner, so that every producer of a topic, ours or not, agrees.

murmur2 with Kafka's seed over the key, the sign bit dropped, modulo the number of partitions. Pure Python and cached: keys (pools,
workers, sessions) repeat, and a numba kernel would cost each short-lived process its compile time.
"""

from __future__ import annotations

from functools import lru_cache

_M = 0x5BD1E995
_SEED = 0x9747B28C
_U32 = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Unsigned 32 bit; equal to org.apache.kafka.common.utils.Utils.murmur2."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _M & _U32
        k = (k ^ k >> 24) * _M & _U32
        h = (h * _M & _U32) ^ k
    if length > whole:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _U32
    h = (h ^ h >> 13) * _M & _U32
    return h ^ h >> 15


@lru_cache(maxsize=65536)
def partition_of(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions
