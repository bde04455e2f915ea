import random

import numpy as np
import pytest

from router.http.usage import Usage
from router.index.prefix_index import BLIND, DEGRADED, EXACT
from router.policy.book import CoefficientBook
from router.policy.cost import Coefficients, Rates
from router.policy.policies import POLICIES
from router.policy.rules import PolicyRules
from router.pools import Pools, TrustRules
from router.prompts.prompt import Prompt
from router.replicas.heard import Heard
from router.replicas.outbox import Outbox, Sender
from schemas.block_hash import HashKey, hash_chain, root_hash, salted_extras
from schemas.fleet import Fleet, Pool, Worker
from schemas.kv_events import COMPLETE, EVENT, Kind, KvBatch, WorkerId
from schemas.workers import BridgeHealth, WorkerLoad


def pools_of(workers=2, pools=("p",), **worker):
    fleet = Fleet(
        pools=tuple(Pool(name=p) for p in pools),
        workers=tuple(Worker(pool=p, name=f"w{i}", url=f"http://h{i}:1", **worker) for p in pools for i in range(workers)),
    )
    return Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10.0, 60.0), random.Random(1))


def batch(worker, hashes, epoch=1, block_size=16, rank=0):
    rows = [(Kind.EPOCH_STARTED, 0, 0, 0, 0, 0.0, 0, 0, COMPLETE), (Kind.STORED, 0, 0, len(hashes), 0, 0.0, 0, block_size, 0)]
    return KvBatch(WorkerId("p", worker, rank), epoch, 0, 0, 0.0, 0.0, np.array(rows, EVENT), np.array(hashes, np.uint64))


def tell(pools, *batches):
    pool = pools.by_name["p"]
    for b in batches:
        pools.index.apply(b, 0.0)
        pool.learn_block_size(pools.index.slot(b.source).block_size)
    return pool


def test_a_pool_follows_when_all_its_workers_restart_with_another_block_size():
    pools = pools_of()
    pool = tell(pools, batch("w0", [1]), batch("w1", [1]))
    tell(pools, batch("w0", [2], epoch=2, block_size=32))
    assert (pool.block_size, pool.block_size_conflicts) == (16, 1)
    tell(pools, batch("w1", [2], epoch=2, block_size=32))
    assert (pool.block_size, pool.block_size_conflicts) == (32, 1)


def test_the_model_names_the_pool():
    one, two = pools_of(), pools_of(pools=("p", "q"))
    assert [two.for_model(m) and (two.for_model(m)[0].name, two.for_model(m)[1]) for m in ("q", "p", None, "x")] == [
        ("q", None), ("p", None), ("p", None), None,
    ]  # fmt: skip
    assert one.for_model("adapter")[1] == "adapter"


@pytest.mark.parametrize(("silence_s", "trust"), [(0, EXACT), (10, EXACT), (11, DEGRADED), (61, BLIND)])
def test_trust_is_no_better_than_the_silence_of_the_bridge_allows(silence_s, trust):
    pools = pools_of()
    pool = tell(pools, batch("w0", [1]))
    assert pools.trust(pool, float(silence_s)).tolist() == [trust, BLIND]


@pytest.mark.parametrize(("behind_s", "trust"), [(10, EXACT), (11, DEGRADED), (61, BLIND)])
def test_trust_is_no_better_than_the_lag_of_the_index_allows(behind_s, trust):
    pools = pools_of()
    pool = tell(pools, batch("w0", [1]))
    pools.index.hear(pools.index.slots[0].source, 1000.0)
    pools.index.level_s = 1000.0 - behind_s
    assert pools.trust(pool, 1000.0).tolist() == [trust, BLIND]


def test_ranks_that_the_engine_chooses_count_by_the_best_overlap_and_the_worst_trust():
    pools = pools_of(workers=1, ranks=2, engine="sglang")
    pool = tell(pools, batch("w0", [1, 2], rank=1))
    prompt = Prompt("exact", 100, 100, np.array([1, 2, 3], np.uint64), 16)
    decided = pools.decide(pool, prompt, set(), 0.0)
    assert (decided.target.rank, decided.now.held.tolist(), decided.now.trust.tolist()) == (None, [32], [BLIND])


def test_when_all_are_down_all_are_tried_and_nobody_twice():
    pools = pools_of()
    pool = pools.by_name["p"]
    pool.health.refused(0)
    pool.health.refused(1)
    prompt = Prompt.unknown(100)
    first = pools.decide(pool, prompt, set(), 0.0).target.number
    assert pools.decide(pool, prompt, {first}, 0.0).target.number == 1 - first
    assert pools.decide(pool, prompt, {0, 1}, 0.0) is None


def fleet_of(*workers):
    return Fleet(pools=(Pool(name="p"),), workers=tuple(Worker(pool="p", name=n, url=f"http://{n}:1", **k) for n, k in workers))


def pools_over(fleet, policy="cost", **given):
    return Pools(fleet, {}, policy, Coefficients(), HashKey(1, 2), TrustRules(1e9, 1e9), random.Random(1), **given)


def load_of(worker, running, waiting=0.0, time_s=1000.0, rank=0, up=True):
    health = BridgeHealth(trust="exact", epoch=1)
    return WorkerLoad(
        pool="p", worker=worker, rank=rank, time_s=time_s, engine="vllm", up=up, running=running, waiting=waiting, bridge=health
    )  # fmt: skip


def test_others_requests_are_in_the_load_while_the_engines_word_is_fresh():
    pools = pools_of()
    pool = pools.by_name["p"]
    pools.hear_load(pool, load_of("w0", 7.0), wall_s=1001.0, now_s=50.0)
    decided = pools.decide(pool, Prompt.unknown(100), set(), 51.0)
    assert (decided.now.in_flight.tolist(), decided.now.decoding.tolist()) == ([7, 0], [7, 0])
    assert decided.target.worker == "w1"
    assert pools.decide(pool, Prompt.unknown(100), set(), 52.1).now.in_flight.tolist() == [0, 0], "it was read at 49"
    pools.hear_load(pool, load_of("w1", 7.0, up=False), wall_s=1001.0, now_s=60.0)
    assert pools.decide(pool, Prompt.unknown(100), set(), 60.0).now.in_flight.tolist() == [0, 0]


def test_our_own_requests_are_not_taken_for_others():
    pools = pools_of()
    pool = pools.by_name["p"]
    for _ in range(5):
        decided = pools.decide(pool, Prompt.unknown(100), {1}, 50.0)
        pools.expect(decided, Prompt.unknown(100), 1.0, 50.0)
        pool.load.admit(0, 0.1, True, 50.0)
    pools.hear_load(pool, load_of("w0", 5.0), wall_s=1000.1, now_s=50.3)
    assert pools.decide(pool, Prompt.unknown(100), set(), 50.4).now.in_flight.tolist() == [5, 0]


def test_requests_of_replicas_are_not_taken_for_others():
    pools = pools_of()
    pool, heard, peer = pools.by_name["p"], Heard(pools, "own", "key", 3.5), Outbox(Sender("peer", "run", "key"))
    pools.decide(pool, Prompt.unknown(100), set(), 5.0)  # long before, and none since
    for _ in range(7):
        peer.reserve(("p", "w0", 0), 0.1, True, np.zeros(0, np.uint64), 2.0)
    heard.hear(peer.news(), 9.0)
    pools.hear_load(pool, load_of("w0", 9.0), wall_s=1000.1, now_s=10.1)
    assert pools.decide(pool, Prompt.unknown(100), set(), 10.2).now.in_flight.tolist() == [9, 0]


def test_what_a_replica_has_ended_hides_no_others_from_a_router_that_decides_nothing():
    pools = pools_of()
    pool, heard, peer = pools.by_name["p"], Heard(pools, "own", "key", 3.5), Outbox(Sender("peer", "run", "key"))
    flight = peer.reserve(("p", "w0", 0), 0.1, True, np.zeros(0, np.uint64), 2.0)
    heard.hear(peer.news(), 9.0)
    for second in range(10, 14):  # it runs, and the engine tells each second
        pools.hear_load(pool, load_of("w0", 1.0), wall_s=1000.0, now_s=float(second))
        assert pool.others.of(0, float(second)) == 0
    peer.free(flight, kept=True)
    heard.hear(peer.news(), 13.5)
    for second in range(14, 17):  # somebody else's now
        pools.hear_load(pool, load_of("w0", 1.0), wall_s=1000.0, now_s=float(second))
    assert pool.others.of(0, 16.0) == 1


def test_of_ranks_that_the_engine_chooses_the_load_is_the_sum_once_all_are_known():
    pools = pools_of(workers=1, ranks=2, engine="sglang")
    pool = pools.by_name["p"]
    pools.hear_load(pool, load_of("w0", 3.0), wall_s=1000.0, now_s=50.0)
    assert pools.decide(pool, Prompt.unknown(100), set(), 50.0).now.in_flight.tolist() == [0]
    pools.hear_load(pool, load_of("w0", 2.0, rank=1), wall_s=1000.0, now_s=50.0)
    assert pools.decide(pool, Prompt.unknown(100), set(), 50.0).now.in_flight.tolist() == [5]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draining_worker_gets_only_what_goes_on_there_whatever_the_policy(policy):
    pools = pools_over(fleet_of(("w0", {}), ("w1", {})), policy)
    pool = tell(pools, batch("w0", range(1, 63)))
    pool.drain("w0")
    for i in range(20):
        cold = Prompt("exact", 1000, 1000, np.arange(100 + 100 * i, 162 + 100 * i, dtype=np.uint64), 16)
        assert pools.decide(pool, cold, set(), 0.0, f"s{i}").target.worker == "w1"
    warm = Prompt("exact", 1000, 1000, np.arange(1, 63, dtype=np.uint64), 16)
    assert pools.decide(pool, warm, set(), 0.0).now.allowed.tolist() == [True, True]
    pool.drain("w0", on=False)
    assert pools.decide(pool, cold, set(), 0.0).now.allowed.tolist() == [True, True]


def test_who_joins_is_capped_while_it_is_colder_than_the_others():
    pools = pools_over(fleet_of(("w0", {}), ("w1", {})), policy_rules=PolicyRules(cold_tokens_per_s=1000.0, cold_s=60.0))
    pool = tell(pools, batch("w0", range(1, 100)), batch("w1", range(1, 100)))
    pools.set_workers("p", (*fleet_of(("w0", {}), ("w1", {}), ("w2", {})).workers,), 10.0)
    cold = Prompt("exact", 5000, 5000, np.arange(1000, 1312, dtype=np.uint64), 16)
    pool.load.admit(0, 9.0, True, 10.0)
    pool.load.admit(1, 9.0, True, 10.0)
    first = pools.decide(pool, cold, set(), 10.0)
    assert first.target.worker == "w2"
    for ticket in pools.expect(first, cold, 1.0, 10.0):
        pools.index.drop(ticket)
    assert pools.decide(pool, cold, set(), 10.5).target.worker != "w2"
    assert pools.decide(pool, cold, set(), 15.0).target.worker == "w2", "what it took too much is paid off"
    assert np.isinf(pools.decide(pool, cold, set(), 70.1).now.cold_left_tokens).all(), "and then it is new no more"
    pools.index.apply(batch("w2", range(1, 60)), 15.0)
    assert np.isinf(pools.decide(pool, cold, set(), 16.0).now.cold_left_tokens).all(), "nor when it is as warm as half the others"


def test_workers_of_the_first_fleet_are_not_new():
    decided = pools_of().decide((pools := pools_of()).by_name["p"], Prompt.unknown(100), set(), 0.0)
    assert np.isinf(decided.now.cold_left_tokens).all()
    assert len(pools.by_name["p"].new_targets(0.0)) == 0


def test_who_joins_an_empty_pool_is_not_new():
    """A router that finds all its workers by discovery starts so; the index fills later, one worker after the other."""
    pools = pools_over(fleet_of())
    pools.set_workers("p", fleet_of(("w0", {}), ("w1", {}), ("w2", {})).workers, 10.0)
    pool = tell(pools, batch("w0", range(1, 100)), batch("w1", range(1, 100)))
    assert np.isinf(pools.decide(pool, Prompt.unknown(100), set(), 11.0).now.cold_left_tokens).all()
    pools.set_workers("p", fleet_of(("w0", {}), ("w1", {}), ("w2", {}), ("w3", {})).workers, 20.0)
    assert np.isfinite(pools.decide(pool, Prompt.unknown(100), set(), 21.0).now.cold_left_tokens).tolist() == [False] * 3 + [True]


def test_a_decision_keeps_what_it_was_made_from():
    pools = pools_of()
    pool = pools.by_name["p"]
    now = pools.decide(pool, Prompt.unknown(100), set(), 0.0).now
    pool.drain("w0")
    pool.load.admit(0, 1.0, True, 0.0)
    assert (now.draining.tolist(), now.in_flight.tolist(), now.queue_s.tolist()) == ([False] * 2, [0, 0], [0.0, 0.0])


@pytest.mark.parametrize("policy", POLICIES)
def test_shadows_change_no_choice(policy):
    """Whatever they draw and count, set at the start or while it runs."""

    def run(*shadows):
        pools = pools_over(fleet_of(*((f"w{i}", {}) for i in range(6))), policy, policy_rules=PolicyRules(shadows=shadows))
        pool, picks = pools.by_name["p"], []
        for i in range(60):
            if i == 30:
                pools.set_shadows("p", shadows[::-1])
            prompt = Prompt("exact", 800, 800, np.arange(100 * (i % 9), 100 * (i % 9) + 49, dtype=np.uint64), 16)
            decided = pools.decide(pool, prompt, set(), i * 0.05, f"s{i % 13}" if i % 2 else None)
            pools.expect(decided, prompt, 1.0, i * 0.05)
            pool.load.admit(decided.target.number, decided.prefill_s, True, i * 0.05)
            picks.append(decided.target.number)
        return picks

    assert run() == run(*POLICIES)


def test_shadows_see_what_the_policy_sees_and_change_nothing():
    fleet = fleet_of(*((f"w{i}", {}) for i in range(4)))
    alone, watched = pools_over(fleet), pools_over(fleet, policy_rules=PolicyRules(shadows=("max_prefix", "round_robin")))
    for pools in (alone, watched):
        tell(pools, batch("w2", range(1, 50)))
    prompt = Prompt("exact", 1000, 1000, np.arange(1, 63, dtype=np.uint64), 16)
    decided = watched.decide(watched.by_name["p"], prompt, set(), 0.0)
    assert [(s.policy, s.target_number) for s in decided.shadows] == [("max_prefix", 2), ("round_robin", 0)]
    assert alone.decide(alone.by_name["p"], prompt, set(), 0.0).target == decided.target
    watched.set_shadows("p", [])
    assert watched.decide(watched.by_name["p"], prompt, set(), 0.0).shadows == ()


def test_coefficients_follow_the_hardware_and_what_is_adopted():
    book = CoefficientBook(Rates(), {"slow": Rates(a=1e-3)})
    pools = pools_over(fleet_of(("w0", {"hardware": "slow"}), ("w1", {"hardware": "fast"})), book=book)
    pool = pools.by_name["p"]
    prompt = Prompt.unknown(4000)
    decided = pools.decide(pool, prompt, set(), 0.0)
    assert (decided.target.worker, decided.coefficients_version) == ("w1", "configured-1")
    assert decided.terms.prefill_s[0] > 9 * decided.terms.prefill_s[1]
    for i in range(1, 200):
        found = pools.decide(pool, prompt, {0}, 0.0)
        usage = Usage(prompt_tokens=100 * i, cached_tokens=0)
        pools.learn(found, usage, ttft_s=100 * i * 3e-3)
    entry = book.entry("p", "fast")
    book.look(entry)
    assert pools.decide(pool, prompt, set(), 0.0).target.worker == "w1", "shown, not used"
    book.adopt("p", "fast", entry.versions[-1].name)
    decided = pools.decide(pool, prompt, set(), 0.0)
    assert (decided.target.worker, decided.coefficients_version) == ("w0", "configured-1")
    assert pools.decide(pool, prompt, {0}, 0.0).coefficients_version == entry.versions[-1].name


def test_outcomes_of_requests_that_waited_behind_others_teach_nothing():
    pools = pools_of()
    pool = pools.by_name["p"]
    pool.load.admit(0, 0.0, True, 0.0)  # overdue, but there
    decided = pools.decide(pool, Prompt.unknown(4000), {1}, 5.0)
    pools.learn(decided, Usage(prompt_tokens=1000, cached_tokens=0), ttft_s=3.0)
    pools.learn(decided, Usage(prompt_tokens=1000, cached_tokens=0, engine_queue_s=1.0, engine_ttft_s=1.5), ttft_s=3.0)
    window = pools.book.entry("p", None).window
    assert window.rows().tolist() == [[1000, 0, 0.5]]
    assert window.useless == {"seconds not known": 1}


def test_prompts_known_by_their_text_follow_where_they_were_sent():
    pools = pools_over(fleet_of(*((f"w{i}", {}) for i in range(6))))
    pool = pools.by_name["p"]
    chain = np.arange(1, 40, dtype=np.uint64)
    first = pools.decide(pool, Prompt("text", None, 64 * 30, chain[:30], 64), set(), 0.0)
    assert first.now.expected.max() == 0
    assert pools.expect(first, Prompt("text", None, 64 * 30, chain[:30], 64), 2.0, 0.0) == []
    longer = Prompt("text", None, 64 * 39, chain, 64)
    decided = pools.decide(pool, longer, set(), 300.0)
    assert decided.target == first.target
    assert decided.now.expected.max() == 64 * 30
    assert set(decided.now.trust.tolist()) == {DEGRADED}, "it is a guess"
    assert pools.decide(pool, longer, set(), 601.0).now.expected.max() == 0, "which fades"
    assert pools.index.match(chain, 0.0).expected.max() == 0


def test_where_no_engine_tells_what_it_holds_prompts_follow_where_they_were_sent():
    pools = pools_over(fleet_of(*((f"w{i}", {}) for i in range(6))))
    pool = pools.by_name["p"]
    prompt = Prompt("exact", 16 * 40, 16 * 40, np.arange(1, 41, dtype=np.uint64), 16)
    first = pools.decide(pool, prompt, set(), 0.0)
    pools.expect(first, prompt, 2.0, 0.0)
    later = pools.decide(pool, prompt, set(), 300.0)
    assert (later.target, later.now.expected.max(), later.now.held.max()) == (first.target, 16 * 40, 0)
    assert set(later.now.trust.tolist()) == {BLIND}
    tell(pools, batch(first.target.worker, [99]))  # it tells now, and holds something else
    assert pools.decide(pool, prompt, set(), 301.0).now.expected.max() == 0
    assert len(pools.approximate) == 0
    pools.expect(pools.decide(pool, prompt, set(), 302.0), prompt, 2.0, 302.0)
    assert len(pools.approximate) == 0


def test_what_was_sent_to_a_worker_that_went_down_or_left_is_no_longer_guessed_there():
    fleet = fleet_of(("w0", {}), ("w1", {}))
    pools = pools_over(fleet)
    pool = pools.by_name["p"]
    prompt = Prompt("text", None, 64 * 30, np.arange(1, 31, dtype=np.uint64), 64)
    for number in (0, 1):
        pools.expect(pools.decide(pool, prompt, {1 - number}, 0.0), prompt, 2.0, 0.0)
    assert pools.decide(pool, prompt, set(), 0.0).now.expected.tolist() == [64 * 30] * 2
    pool.health.refused(0)
    assert pools.decide(pool, prompt, set(), 0.0).now.expected.tolist() == [0, 64 * 30]
    pools.index.release(WorkerId("p", "w1", 0))
    assert pools.decide(pool, prompt, set(), 0.0).now.expected.tolist() == [0, 0]


def test_groups_of_another_block_size_are_matched_by_a_chain_of_their_own():
    pools = pools_of()
    pool = pools.by_name["p"]
    tell(pools, batch("w0", [1], block_size=16))
    ids = np.arange(100, dtype=np.uint32)
    assert pool.other_chains(ids, None, None) == {}
    for seq, (group, size) in enumerate(((0, 16), (1, 32)), 1):
        names = pool.chain(ids, "adapter", "salt")[:5] if size == 16 else pool.other_chains(ids, "adapter", "salt").get(32)
        if names is None:  # the index has not heard of that size yet
            names = hash_chain(HashKey(1, 2), root_hash(HashKey(1, 2), "p", "adapter"), ids, 32, salted_extras(HashKey(1, 2), 3, "salt"))
        event = np.array([(Kind.STORED, 0, group, len(names), seq, 0.0, 0, size, 0)], EVENT)
        pools.index.apply(KvBatch(WorkerId("p", "w0", 0), 1, seq, seq, 0.0, 0.0, event, names), 0.0)
    chain, others = pool.chain(ids, "adapter", "salt"), pool.other_chains(ids, "adapter", "salt")
    assert list(others) == [32]
    held = [pools.decide(pool, Prompt("exact", 100, 100, chain, 16, others=o), set(), 0.0).now.held.tolist() for o in (others, {})]
    assert held == [[64, 0], [0, 0]]
