"""Compiles the router's kernels (or loads them from numba's cache) before the first request, which would else wait seconds for them.

A made-up pool goes through everything that a request and its events go through.
"""

from __future__ import annotations

import random

import numpy as np

from router.policy.cost import Coefficients
from router.policy.policies import POLICIES
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from router.records.candidates import listed
from schemas.block_hash import HashKey
from schemas.fleet import Fleet
from schemas.kv_events import COMPLETE, EVENT, FIRST, LAST, WINDOWED, Kind, KvBatch, WorkerId, decode, encode

_BLOCKS = 1000
"""More than fit in the smallest table, so that it grows."""
_MARKS = (
    (Kind.EPOCH_STARTED, 0, 0, 0),
    (Kind.STORED, 0, 0, _BLOCKS - 1),
    (Kind.STORED, WINDOWED, 1, _BLOCKS - 1),
    (Kind.REMOVED, 0, 0, 1),
    (Kind.SNAPSHOT, COMPLETE | FIRST | LAST, 0, _BLOCKS - 1),
    (Kind.STORED, WINDOWED, 1, _BLOCKS - 2),
)
"""kind, flags, attention group, blocks"""


def warm_up() -> None:
    """Takes some ten seconds on a new machine, a fraction of one later."""
    fleet = Fleet.model_validate(
        {"pools": [{"name": "p"}], "workers": [{"pool": "p", "url": f"http://127.0.0.1:{port}"} for port in (1, 2)]}
    )
    pools = Pools(fleet, {}, "cost", Coefficients(), HashKey(0, 0), TrustRules(1, 1), random.Random(0))
    (pool,) = pools
    pool.block_size = 16
    ids = np.arange(16 * _BLOCKS, dtype=np.uint32)  # one block more than is stored, so that something is expected
    chain = pool.chain(ids, None, "salt")
    assert chain is not None
    for seq, (kind, flags, group, count) in enumerate(_MARKS):
        events = np.zeros(1, EVENT)
        events["kind"], events["flags"], events["group"], events["count"], events["seq"] = kind, flags, group, count, seq
        batch = KvBatch(WorkerId("p", "127.0.0.1:1", 0), 1, seq, seq, None, 0.0, events, chain[:count])
        pools.index.apply(decode(encode(batch)), 0.0)  # as it comes from the stream: arrays that cannot be written to
    prompt = Prompt("exact", len(ids), len(ids), chain, 16)
    tickets = []
    for policy in (*POLICIES, "cost"):  # the later ones meet expected blocks, too
        pools.set_policy("p", policy)
        decided = pools.decide(pool, prompt, set(), 0.0, "session")
        assert decided is not None
        listed(decided)
        tickets += pools.expect(decided, prompt, 1.0, 0.0)
    for ticket in tickets:
        pools.index.drop(ticket)
    text = Prompt("text", None, len(ids), chain, 16)
    for _ in range(2):
        decided = pools.decide(pool, text, set(), 0.0)
        assert decided is not None
        pools.expect(decided, text, 1.0, 0.0)
    pools.approximate.expire(1e9)
    pools.index.expire(10.0)
    pools.index.forget()
