"""Who holds a prefix now."""

import random

from collector.analytics.holders import holders
from collector.residency import Residency
from schemas.kv_events import COMPLETE, Kind, WorkerId
from tests.collector.batches import batch, event, random_batches
from tests.collector.naive import NaiveWorker
from tests.collector.test_residency import feed


def test_holders_are_the_workers_that_hold_the_block_in_any_tier_and_group():
    workers = [WorkerId("p", name, 0) for name in "abc"]
    state = Residency(256, 1024, 16)
    numbers = {w: state.worker() for w in workers}
    assert holders(state, workers, 7) is None
    rng = random.Random(5)
    twins = {w: NaiveWorker() for w in workers}
    for w in workers:
        for b in random_batches(rng, w, 60, 30):
            feed(state, [b], numbers)
            twins[w].apply(b)
    for block in range(1, 30):
        expected = sum(any(n > 0 for (_, _, b), n in twin.held.items() if b == block) for twin in twins.values())
        assert holders(state, workers, block) == expected


def test_a_cleared_worker_holds_nothing():
    worker = WorkerId("p", "a", 0)
    state = Residency(256, 1024, 16)
    numbers = {worker: state.worker()}
    feed(state, [batch(worker, 1, 0, 10.0, event(Kind.EPOCH_STARTED, flags=COMPLETE), event(Kind.STORED, [1, 2]))], numbers)
    assert holders(state, [worker], 2) == 1
    feed(state, [batch(worker, 1, 1, 11.0, event(Kind.CLEARED))], numbers)
    assert holders(state, [worker], 2) == 0
