from __future__ import annotations

import random

import pytest

import schemas.stream.kafka  # noqa: F401  (imports kafka-python without its deprecation warnings)
from schemas.stream.partitioning import murmur2, partition_of

# org.apache.kafka.common.utils.UtilsTest.testMurmur2
KAFKA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", KAFKA_VECTORS)
def test_murmur2_equals_kafkas_own_vectors(key: bytes) -> None:
    assert murmur2(key) == KAFKA_VECTORS[key] & 0xFFFFFFFF


def test_partitions_equal_kafka_pythons_for_random_keys() -> None:
    from kafka.partitioner.default import DefaultPartitioner
    from kafka.partitioner.default import murmur2 as reference

    assert DefaultPartitioner is not None
    rng = random.Random(7)
    for length in range(40):
        key = rng.randbytes(length)
        assert partition_of(key, 12) == (reference(key) & 0x7FFFFFFF) % 12
