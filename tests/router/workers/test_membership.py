"""Who belongs to a pool, over the sources; and that a change leaves nothing of who is gone."""

import asyncio
import random

import numpy as np
import pytest

from router.index.prefix_index import BLIND, EXACT
from router.policy.cost import Coefficients
from router.pools import Pools, TooManyWorkers, TrustRules
from router.prompts.prompt import Prompt
from router.workers.membership import Membership, NotAllowed
from router.workers.rules import WorkerRules
from schemas.block_hash import HashKey
from schemas.changes import Change
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, WorkerId


class Written:
    def __init__(self):
        self.changes = []

    def change(self, kind, record):
        change = Change.model_validate_json(record)
        assert (kind, change.kind, change.author) == ("scale", "scale", "r1")
        self.changes.append((change.pool, change.worker, change.text))


def worker(name, url=None, pool="p", **given):
    return Worker(pool=pool, name=name, url=url or f"http://{name}:1", **given)


def fleet(*names):
    return Fleet(pools=(Pool(name="p"),), workers=tuple(worker(n) for n in names))


def member(*names, drain_s=10.0, **rules):
    pools = Pools(
        fleet(*names), {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10.0, 60.0), random.Random(1),
        worker_rules=WorkerRules(**rules),
    )  # fmt: skip
    written = Written()
    return Membership(fleet(*names), pools, written, "r1", drain_s), pools, written


def here(pools):
    return [t.worker for t in pools.by_name["p"].here()]


def up(pools):
    pool = pools.by_name["p"]
    return {t.worker for t in pool.targets if pool.allowed((), 0.0)[t.number]}


def test_the_fleet_file_adds_and_takes_out():
    m, pools, written = member("a", "b")
    m.from_file(fleet("b", "c"), 5.0)
    assert (here(pools), up(pools), m.joined, m.left) == (["c", "b"], {"b", "c"}, 1, 1)
    assert written.changes == [
        ("p", "a", "worker a at http://a:1 is taken out: the fleet file no longer names it"),
        ("p", "c", "worker c at http://c:1 joins: fleet file"),
    ]
    assert pools.by_name["p"].added_s.tolist() == [5.0, -np.inf]
    m.from_file(fleet("b", "c"), 6.0)
    assert len(written.changes) == 2


def test_requests_on_their_way_end_undisturbed_and_leave_nothing():
    m, pools, _ = member("a", "b")
    pool = pools.by_name["p"]
    flight = pool.load.admit(0, 1.0, True, 0.0)
    m.from_file(fleet("b", "c"), 1.0)
    assert ([t.worker for t in pool.targets], pool.present.tolist()) == (["a", "b", "c"], [False, True, True])
    assert pools.decide(pool, Prompt.unknown(100), {1, 2}, 1.0) is None
    pool.health.answered(0)
    pool.load.first_token(flight, 2.0)
    pool.load.release(flight, 3.0)
    m.from_file(fleet("b", "c", "d"), 4.0)
    assert [t.worker for t in pool.targets] == ["d", "b", "c"]
    assert not (pool.load.in_flight.any() or pool.load.decoding.any())


def batch(name, hashes):
    rows = [(Kind.EPOCH_STARTED, 0, 0, 0, 0, 0.0, 0, 0, COMPLETE), (Kind.STORED, 0, 0, len(hashes), 0, 0.0, 0, 16, 0)]
    return KvBatch(WorkerId("p", name, 0), 1, 0, 0, 0.0, 0.0, np.array(rows, EVENT), np.array(hashes, np.uint64))


def test_blocks_of_who_is_gone_and_silent_are_forgotten_and_those_of_the_others_are_not():
    m, pools, _ = member("a", "b")
    for name in "ab":
        pools.index.apply(batch(name, [1, 2, 3]), 0.0)
    m.from_file(fleet("b", "c"), 1.0)
    pools.forget_strangers(60.0)
    assert len(pools.index.slots) == 3
    pools.forget_strangers(61.0)
    assert {s.source.worker for s in pools.index.slots} == {"b", "c"}
    pool = pools.by_name["p"]
    prompt = Prompt("exact", 100, 100, np.array([1, 2, 3], np.uint64), 16)
    decided = pools.decide(pool, prompt, set(), 1.0)
    held = dict(zip([t.worker for t in pool.targets], decided.now.held.tolist(), strict=True))
    assert (decided.target.worker, held) == ("b", {"c": 0, "b": 48})
    assert pools.trust(pool, 1.0)[next(t.number for t in pool.here() if t.worker == "c")] == BLIND


def test_a_worker_that_told_its_epochs_start_before_it_joined_is_known_exactly():
    m, pools, _ = member("a")
    assert pools.knows(WorkerId("p", "new", 0))
    pools.index.apply(batch("new", [1, 2, 3]), 0.0)
    m.from_file(fleet("a", "new"), 1.0)
    pool = pools.by_name["p"]
    decided = pools.decide(pool, Prompt("exact", 100, 100, np.array([1, 2, 3], np.uint64), 16), set(), 1.0)
    assert (decided.target.worker, int(pools.trust(pool, 1.0)[decided.target.number])) == ("new", EXACT)
    pools.forget_strangers(1000.0)
    assert len(pools.index.slots) == 2


def test_strangers_are_followed_within_a_bound_and_only_those_of_our_pools():
    _, pools, _ = member("a")
    assert not pools.knows(WorkerId("q", "x", 0))
    known = [pools.knows(WorkerId("p", f"x{n}", 0)) for n in range(100)]
    assert known == [True] * 64 + [False] * 36
    pools.forget_strangers(0.0)  # none of them has been heard
    assert pools.knows(WorkerId("p", "x99", 0))


def test_another_hash_key_of_who_is_gone_is_not_held_against_who_comes():
    m, pools, _ = member("a")
    pools.hear_key(WorkerId("p", "a", 0), "another")
    m.from_file(fleet("b"), 1.0)
    pools.forget_strangers(1.0)
    m.from_file(fleet("b", "c"), 2.0)
    assert len(pools.index.slots) == 2
    assert not pools.has_other_key(pools.by_name["p"], 1)
    assert not pools.has_other_key(pools.by_name["p"], 0)


def test_admin_adds_and_removes_and_what_is_removed_stays_out_while_the_file_names_it():
    m, pools, written = member("a")
    m.add("p", worker("b"), 1.0)
    assert (here(pools), m.source_of("p", "b")) == (["a", "b"], "admin")
    m.from_file(fleet("a"), 2.0)
    assert here(pools) == ["a", "b"]
    m.remove("p", "a", 3.0)
    m.from_file(fleet("a", "c"), 4.0)
    assert (sorted(here(pools)), m.removed("p")) == (["b", "c"], ("a",))
    m.undrain("p", "a", 5.0)
    assert (sorted(here(pools)), m.removed("p")) == (["a", "b", "c"], ())
    m.remove("p", "a", 6.0)
    m.from_file(fleet("c"), 7.0)
    m.from_file(fleet("a", "c"), 8.0)  # it was away and is back: another word
    assert sorted(here(pools)) == ["a", "b", "c"]
    assert ("p", "a", "worker a at http://a:1 is taken out: by the admin port") in written.changes


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda m: m.add("q", worker("x", pool="p"), 0.0), "there is no pool 'q'; there are p"),
        (lambda m: m.add("p", worker("a", "http://other:1"), 0.0), "`name`: the pool p has a at http://a:1 already"),
        (lambda m: m.add("p", worker("x", "http://a:1"), 0.0), "`url`: the pool p has a at http://a:1 already"),
        (lambda m: m.remove("p", "x", 0.0), "the pool p has no worker 'x'; it has a"),
        (lambda m: m.drain("p", "x", 0.0), "the pool p has no worker 'x'"),
        (lambda m: m.undrain("p", "a", 0.0), "no worker 'a' that drains or was removed"),
        (lambda m: m.undrain("q", "a", 0.0), "there is no pool 'q'"),
    ],
)
def test_what_makes_no_sense_is_said_and_changes_nothing(ask, says):
    m, pools, written = member("a")
    with pytest.raises(NotAllowed, match=says):
        ask(m)
    assert (here(pools), written.changes) == (["a"], [])


def test_a_draining_worker_leaves_when_it_is_empty():
    m, pools, written = member("a", "b")
    pool = pools.by_name["p"]
    flight = pool.load.admit(0, 1.0, True, 0.0)
    m.drain("p", "a", 0.0)
    m.drain("p", "a", 0.5)
    m.tend("p", 1.0)
    assert (here(pools), pool.draining.tolist()) == (["a", "b"], [True, False])
    pool.load.release(flight, 2.0)
    m.tend("p", 2.0)
    assert (here(pools), pool.draining.any(), m.removed("p")) == (["b"], np.False_, ("a",))
    assert [text for _, _, text in written.changes] == [
        "worker a drains: by the admin port", "worker a at http://a:1 is taken out: drained",
    ]  # fmt: skip


def test_a_draining_worker_that_does_not_empty_leaves_when_its_time_is_over():
    m, pools, written = member("a", "b", drain_s=10.0)
    pools.by_name["p"].load.admit(0, 1.0, True, 0.0)
    m.drain("p", "a", 0.0)
    m.tend("p", 9.9)
    assert here(pools) == ["a", "b"]
    m.tend("p", 10.0)
    assert (here(pools), written.changes[-1][2]) == (["b"], "worker a at http://a:1 is taken out: drained, 1 requests still on their way")


def test_a_drain_can_be_taken_back():
    m, pools, _ = member("a", "b")
    m.drain("p", "a", 0.0)
    m.undrain("p", "a", 1.0)
    m.tend("p", 100.0)
    assert (here(pools), pools.by_name["p"].draining.any()) == (["a", "b"], np.False_)


def test_a_drain_lasts_over_other_changes():
    m, pools, _ = member("a", "b")
    pools.by_name["p"].load.admit(0, 1.0, True, 0.0)
    m.drain("p", "a", 0.0)
    m.from_file(fleet("b", "a", "c"), 1.0)
    pool = pools.by_name["p"]
    assert {t.worker for t in pool.here() if pool.draining[t.number]} == {"a"}


def test_discovery_joins_and_leaves_beside_the_file_and_never_twice():
    m, pools, _ = member("a")
    m.found("p", [worker("x"), worker("y"), worker("same", "http://a:1")], frozenset(), 1.0)
    assert (here(pools), m.source_of("p", "x")) == (["a", "x", "y"], "discovery")
    m.found("p", [worker("y")], frozenset(), 2.0)
    assert here(pools) == ["a", "y"]
    m.from_file(fleet("y"), 3.0)
    assert (here(pools), m.source_of("p", "y")) == (["y"], "fleet file")


def test_a_pod_that_is_about_to_end_drains_and_is_not_let_in_again_before_it_is_gone():
    m, pools, _ = member()
    pods = [worker("x"), worker("y")]
    m.found("p", pods, frozenset(), 1.0)
    flight = pools.by_name["p"].load.admit(0, 1.0, True, 1.0)
    m.found("p", pods, frozenset({"x"}), 2.0)
    assert pools.by_name["p"].draining.tolist() == [True, False]
    pools.by_name["p"].load.release(flight, 3.0)
    m.tend("p", 3.0)
    m.found("p", pods, frozenset({"x"}), 4.0)
    assert here(pools) == ["y"]
    m.found("p", [worker("y")], frozenset(), 5.0)
    m.found("p", pods, frozenset(), 6.0)
    assert sorted(here(pools)) == ["x", "y"]


def test_a_pod_that_ends_after_all_not_drains_no_longer():
    m, pools, _ = member("a")
    m.found("p", [worker("x")], frozenset({"x"}), 1.0)
    m.found("p", [worker("x")], frozenset(), 2.0)
    m.tend("p", 2.0)
    assert (here(pools), pools.by_name["p"].draining.any()) == (["a", "x"], np.False_)


def test_an_address_that_the_admin_port_has_added_is_not_a_second_worker_when_the_file_names_it():
    m, pools, _ = member("a")
    m.add("p", worker("x", "http://x:1"), 1.0)
    both = Fleet(pools=(Pool(name="p"),), workers=(worker("a"), worker("other", "http://x:1")))
    m.from_file(both, 2.0)
    assert here(pools) == ["a", "x"]
    m.remove("p", "x", 3.0)
    assert here(pools) == ["a", "other"]
    m.remove("p", "other", 4.0)
    m.add("p", worker("x", "http://x:1"), 5.0)
    m.remove("p", "x", 6.0)
    assert (here(pools), m.removed("p")) == (["a"], ("other",))


def test_more_workers_than_can_be_followed_change_nothing():
    m, pools, written = member("a", "b")
    m.remove("p", "b", 1.0)
    for ask in (
        lambda: m.from_file(Fleet(pools=(Pool(name="p"),), workers=tuple(worker(f"x{i}", ranks=1024) for i in range(4))), 1.0),
        lambda: m.found("p", [worker(f"x{i}", ranks=1024) for i in range(4)], frozenset(), 1.0),
    ):
        with pytest.raises(TooManyWorkers, match="at most 4031"):
            ask()
    for i in range(3):
        m.add("p", worker(f"y{i}", ranks=1024), 2.0)
    with pytest.raises(TooManyWorkers):
        m.add("p", worker("b", ranks=1024), 2.0)
    assert (sorted(here(pools)[:1]), m.removed("p"), len(written.changes)) == (["a"], ("b",), 4)
    pool = pools.by_name["p"]
    assert len(pool.here()) == 1 + 3 * 1024
    assert pools.decide(pool, Prompt.unknown(10), set(), 2.0) is not None


def test_an_engines_password_is_told_nobody(caplog):
    caplog.set_level("INFO")
    m, pools, written = member("a")
    m.add("p", worker("x", "http://user:secret@x:1"), 1.0)
    with pytest.raises(NotAllowed, match="has x at http://x:1 already"):
        m.add("p", worker("x", "http://other:1"), 1.0)
    pools.by_name["p"].health.refused(1)
    m.remove("p", "x", 2.0)
    assert len(written.changes) == 2
    assert "at http://x:1 joins" in caplog.text
    assert "secret" not in f"{caplog.text} {written.changes}"


def test_a_pool_that_is_emptied_says_so_in_the_log(caplog):
    m, _, _ = member("a")
    m.from_file(fleet(), 1.0)
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == ["pool p: no worker is left"]


@pytest.mark.parametrize("how", ["hangs", "drains", "is gone", "has too many"])
async def test_what_is_on_its_way_to_a_worker_that_takes_no_new_ones_takes_no_place_from_the_others(how):
    m, pools, _ = member("a", "b", max_in_flight=2)
    pool = pools.by_name["p"]
    for _ in range(3 if how == "has too many" else 2):
        await pool.admission.enter()
        pool.load.admit(0, 1.0, True, 0.0)
    if how == "hangs":
        pool.health.broke(0)
        pool.health.broke(0)
    elif how != "has too many":
        {"drains": m.drain, "is gone": m.remove}[how]("p", "a", 1.0)
    for _ in range(2):
        assert await pool.admission.enter() == 0.0
        pool.load.admit(1, 1.0, True, 0.0)
    third = asyncio.create_task(pool.admission.enter())
    await asyncio.sleep(0)
    assert pool.admission.waiting == 1
    third.cancel()


async def test_what_replicas_sent_takes_no_place_of_this_router():
    _, pools, _ = member("a", "b", max_in_flight=2)
    pool = pools.by_name["p"]
    for _ in range(5):
        pool.load.admit(0, 1.0, True, 0.0, of_replica=True)
    assert pool.allowed((), 0.0).tolist() == [True, True]
    for target in (0, 0, 1, 1):
        assert await pool.admission.enter() == 0.0
        pool.load.admit(target, 1.0, True, 0.0)
    fifth = asyncio.create_task(pool.admission.enter())
    await asyncio.sleep(0)
    assert pool.admission.waiting == 1
    fifth.cancel()


async def test_with_a_limit_a_pool_that_lost_all_its_workers_keeps_nobody_waiting():
    m, pools, _ = member("a", max_in_flight=1)
    pool = pools.by_name["p"]
    await pool.admission.enter()
    pool.load.admit(0, 1.0, True, 0.0)
    m.remove("p", "a", 1.0)
    assert await pool.admission.enter() == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_numbers_slots_and_counts_stay_right(seed):
    """Against a naive twin: sets of names."""
    rng, now_s = random.Random(seed), 0.0
    m, pools, _ = member("w0", "w1", drain_s=5.0)
    pool = pools.by_name["p"]
    names = [f"w{n}" for n in range(12)]
    in_file, found, flights, most = {"w0", "w1"}, set(), [], 0
    for _ in range(200):
        now_s += rng.random()
        what = rng.random()
        if what < 0.2:
            in_file = set(rng.sample(names, rng.randrange(8)))
            m.from_file(fleet(*sorted(in_file)), now_s)
        elif what < 0.35:
            found = set(rng.sample(names, rng.randrange(6)))
            m.found("p", [worker(n) for n in sorted(found)], frozenset(), now_s)
        elif what < 0.45 and here(pools):
            getattr(m, rng.choice(("drain", "remove")))("p", rng.choice(here(pools)), now_s)
        elif what < 0.75 and here(pools):
            target = rng.choice(pool.here())
            pools.index.expect(pool.slots_of(target.number)[0].number, np.array([1, 2], np.uint64), now_s + 3)
            flights.append((target, pool.load.admit(target.number, 1.0, True, now_s)))
        elif flights:
            target, flight = flights.pop(rng.randrange(len(flights)))
            assert pool.targets[target.number] == target  # its number was nobody else's meanwhile
            pool.load.release(flight, now_s)
        m.tend("p", now_s)
        pools.forget_strangers(now_s)
        assert set(here(pools)) == (in_file | found) - set(m.removed("p"))
        assert set(m.removed("p")) <= in_file | found
        numbers = [s.number for t in pool.here() for s in pool.slots_of(t.number)]
        assert len(set(numbers)) == len(numbers) == len(pools.index.slots)
        most = max(most, len(flights))
        assert len(pool.targets) <= 12 + most
        assert pool.load.in_flight.sum() == len(flights)
        assert up(pools) == set(here(pools))
    for _, flight in flights:
        pool.load.release(flight, now_s)
    assert not (pool.load.in_flight.any() or pool.load.decoding.any() or pool.load.queue_s(now_s).any())
