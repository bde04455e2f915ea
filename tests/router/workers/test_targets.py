import pytest

from router.workers.targets import renumbered, targets_of
from schemas.fleet import Pool, Worker


def targets(*ranks, choose_rank=True, engine="vllm"):
    workers = [Worker(pool="p", name=f"w{i}", url=f"http://h{i}:1", ranks=r, engine=engine) for i, r in enumerate(ranks)]
    return targets_of(Pool(name="p"), workers, choose_rank)


def test_each_rank_of_vllm_is_a_target_with_its_header():
    found = targets(1, 2)
    assert [(t.number, t.worker, t.rank, t.headers) for t in found] == [
        (0, "w0", 0, ()),
        (1, "w1", 0, (("X-data-parallel-rank", "0"),)),
        (2, "w1", 1, (("X-data-parallel-rank", "1"),)),
    ]


@pytest.mark.parametrize("given", [{"choose_rank": False}, {"engine": "sglang"}])
def test_ranks_that_cannot_be_chosen_are_one_target(given):
    (only,) = targets(2, **given)
    assert (only.rank, [s.rank for s in only.sources]) == (None, [0, 1])


def change(old, present, workers, busy=()):
    wanted = targets_of(Pool(name="p"), workers, True)
    found, here = renumbered(old, present, wanted, lambda number: number not in busy)
    assert [t.number for t in found] == list(range(len(found)))
    return found, list(here), [t.worker for t in found]


def worker(name, url=None, ranks=1):
    return Worker(pool="p", name=name, url=url or f"http://{name}:1", ranks=ranks)


def test_who_stays_keeps_his_number_and_who_joins_takes_that_of_one_who_is_gone():
    old, here, _ = change((), (), [worker("a"), worker("b"), worker("c")])
    found, here, names = change(old, here, [worker("c"), worker("a"), worker("d"), worker("e")])
    assert (names, here) == (["a", "d", "c", "e"], [True] * 4)
    assert (found[0] is old[0], found[2] is old[2]) == (True, True)


def test_a_number_is_not_taken_while_something_is_on_its_way_there():
    old, here, _ = change((), (), [worker("a"), worker("b")])
    old, here, names = change(old, here, [worker("b"), worker("c")], busy={0})
    assert (names, here) == (["a", "b", "c"], [False, True, True])
    _, here, names = change(old, here, [worker("b"), worker("c"), worker("d")])
    assert (names, here) == (["d", "b", "c"], [True] * 3)


@pytest.mark.parametrize("other", [worker("a", "http://elsewhere:1"), worker("a", ranks=2)])
def test_a_worker_with_another_address_or_other_ranks_is_another_target(other):
    old, here, _ = change((), (), [worker("a"), worker("b")])
    found, here, names = change(old, here, [other, worker("b")], busy={0})
    assert (names[:2], here[:2], found[2].worker) == (["a", "b"], [False, True], "a")


def test_who_comes_back_while_his_last_request_ends_takes_a_new_number():
    old, here, _ = change((), (), [worker("a")])
    old, here, _ = change(old, here, [], busy={0})
    _, here, names = change(old, here, [worker("a")], busy={0})
    assert (names, here) == (["a", "a"], [False, True])
