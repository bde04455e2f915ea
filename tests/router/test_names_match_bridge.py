"""Router and bridge, each by its own code, give a prompt's blocks the same names."""

import random

import msgspec
import pytest

from collector.bridge.recorded import RecordedFrame, replay_frames
from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from schemas.block_hash import HashKey
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import WorkerId, decode

KEY = HashKey(7, 9)
IDS = list(range(100, 170))  # four blocks of 16 and a part


def stored(**fields):
    event = {
        "type": "BlockStored", "block_hashes": [11, 12, 13, 14], "parent_block_hash": None, "token_ids": IDS[:64], "block_size": 16,
        "lora_id": None, "lora_name": None, "medium": "GPU",
    }  # fmt: skip
    return RecordedFrame(1.0, [b"", (0).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [event | fields], 0])])


@pytest.mark.parametrize(
    ("fields", "lora", "salt"),
    [
        ({}, None, None),
        ({"extra_keys": [["s"], None, None, None]}, None, "s"),
        ({"lora_id": 3, "lora_name": "fix", "extra_keys": [["fix"]] * 4}, "fix", None),
        ({"lora_id": 3, "lora_name": "fix", "extra_keys": [["fix", "s"], ["fix"], ["fix"], ["fix"]]}, "fix", "s"),
    ],
    ids=["plain", "salt", "lora", "lora and salt"],
)
def test_router_finds_what_the_bridge_named(fields, lora, salt):
    fleet = Fleet(pools=(Pool(name="p"),), workers=(Worker(pool="p", name="w", url="http://w:1"),))
    pools = Pools(fleet, {}, "cost", Coefficients(), KEY, TrustRules(1e9, 1e9), random.Random(1))
    pool = pools.by_name["p"]
    pool.learn_block_size(16)
    for record in replay_frames([stored(**fields)], WorkerId("p", "w", 0), KEY):
        pools.index.apply(decode(record), 0.0)
    for asked_lora, asked_salt in {(lora, salt), (None, None), ("fix", None), (None, "s"), ("fix", "s")}:
        chain = pool.chain(IDS, asked_lora, asked_salt)
        decided = pools.decide(pool, Prompt("exact", len(IDS), len(IDS), chain, 16), set(), 0.0)
        assert decided.cached_tokens == (64 if (asked_lora, asked_salt) == (lora, salt) else 0)
