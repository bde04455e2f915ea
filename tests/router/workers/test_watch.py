"""The fleet file and discovery are looked at while the router runs; what is broken changes nothing and says so."""

import asyncio
import os
import random
import threading

import pytest

from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.workers.membership import Membership
from router.workers.watch import Watch
from schemas.block_hash import HashKey
from schemas.fleet import load_fleet
from tests.router.running import until

POOL = '[[pools]]\nname = "p"\n'


def write(file, *names, head=POOL):
    file.write_text(head + "".join(f'[[workers]]\npool = "p"\nname = "{n}"\nurl = "http://{n}:1"\n' for n in names))
    write.count += 1
    os.utime(file, ns=(write.count * 10**9, write.count * 10**9))


write.count = 0


@pytest.fixture
def watched(tmp_path):
    file = tmp_path / "fleet.toml"

    def make(*names, head=POOL):
        write(file, *names, head=head)
        fleet = load_fleet(file)
        pools = Pools(fleet, {}, "cost", Coefficients(), HashKey(1, 2), TrustRules(10.0, 60.0), random.Random(1))
        return file, pools, Watch(fleet, file, Membership(fleet, pools, None, "r1", 10.0), 0.0)

    return make


def here(pools):
    return sorted(t.worker for t in pools.by_name["p"].here())


async def test_a_file_that_changed_is_read_when_it_has_settled(watched):
    file, pools, watch = watched("a")
    await watch.look()
    write(file, "a", "b")
    await watch.look()
    assert here(pools) == ["a"]  # perhaps it is still being written
    await watch.look()
    assert here(pools) == ["a", "b"]
    await watch.look()
    assert (watch.loads, watch.trouble) == (1, {})


async def test_a_signal_reads_it_at_once(watched):
    file, pools, watch = watched("a")
    watching = asyncio.create_task(watch.run())
    write(file, "b")
    watch.read_anew()
    await until(lambda: here(pools) == ["b"])
    watching.cancel()


async def test_a_storm_of_signals_reads_it_once_or_twice_and_its_last_word_holds(watched, monkeypatch):
    file, pools, watch = watched("a")
    reads, go = [], threading.Event()

    def slowly(path):
        reads.append(path)
        go.wait(10)
        return load_fleet(path)

    monkeypatch.setattr("router.workers.watch.load_fleet", slowly)
    watching = asyncio.create_task(watch.run())
    watch.read_anew()
    await until(lambda: reads)
    for _ in range(100):
        watch.read_anew()
    write(file, "b")
    go.set()
    await until(lambda: watch.loads == 2)
    assert (len(reads), here(pools), watch._asked.is_set()) == (2, ["b"], False)
    watching.cancel()


async def test_what_goes_wrong_within_a_look_does_not_end_the_watch(watched, monkeypatch, caplog):
    file, pools, watch = watched("a")

    async def stumbles(*_):
        monkeypatch.undo()
        raise RuntimeError("an error of ours")

    monkeypatch.setattr(watch, "look", stumbles)
    watching = asyncio.create_task(watch.run())
    await until(lambda: watch.failures == 1)
    assert [r.message for r in caplog.records] == ["looking for workers failed"]
    write(file, "b")
    watch.read_anew()
    await until(lambda: here(pools) == ["b"])
    watching.cancel()


async def test_a_file_that_changed_while_the_router_started_is_read(watched):
    file, pools, watch = watched("a")
    fleet = load_fleet(file)
    write(file, "b")  # while tokenizers were read
    watch = Watch(fleet, file, watch._membership, 0.0)
    await watch.look()
    await watch.look()
    assert here(pools) == ["b"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("[[", "is no TOML"),
        (POOL + '[[workers]]\npool = "p"\nurl = "nowhere"\n', r"workers\[0\].url"),
        (None, "cannot be read"),
        ('[[pools]]\nname = "other"\n', "restart the router to change pools"),
    ],
)
async def test_a_broken_file_keeps_the_old_fleet_and_says_so_until_it_is_mended(watched, caplog, broken, says):
    file, pools, watch = watched("a")
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    for _ in range(4):
        await watch.look()
    assert (here(pools), list(watch.trouble), watch.failures) == (["a"], ["fleet file"], 1)
    assert says.replace("\\", "") in watch.trouble["fleet file"]
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    write(file, "a", "b")
    await watch.look()
    await watch.look()
    assert (here(pools), watch.trouble) == (["a", "b"], {})


async def test_more_workers_than_can_be_followed_change_nothing_and_it_says_so(watched, tmp_path):
    endpoints = tmp_path / "endpoints.json"
    _, pools, watch = watched("a", head=POOL + f'discover = "file://{endpoints}?ranks=1024"\n')
    endpoints.write_text('["http://x:1", "http://y:1", "http://z:1", "http://zz:1"]')
    await watch.look(at_once=True)
    assert (here(pools), list(watch.trouble)) == (["a"], ["discover of p"])


async def test_an_endpoints_file_is_read_at_the_start_and_when_it_changes(watched, tmp_path):
    endpoints = tmp_path / "endpoints.json"
    _, pools, watch = watched(head=POOL + f'discover = "file://{endpoints}"\n')
    await watch.look(at_once=True, file=False)
    assert (here(pools), list(watch.trouble)) == ([], ["discover of p"])
    endpoints.write_text('["http://x:1"]')
    await watch.look()
    await watch.look()
    assert (here(pools), watch.trouble) == (["x:1"], {})
    endpoints.write_text('["http://x:1", "http://y:1"')
    await watch.look()
    await watch.look()
    assert (here(pools), list(watch.trouble)) == (["x:1"], ["discover of p"])
    endpoints.write_text('["http://y:1"]')
    await watch.look()
    await watch.look()
    assert (here(pools), watch.trouble) == (["y:1"], {})


async def test_a_pool_may_have_no_worker_but_those_found(watched):
    _, pools, watch = watched(head=POOL + 'discover = "dns://127.0.0.1:8000"\n')
    assert here(pools) == []
    await watch.look()
    assert here(pools) == ["127.0.0.1:8000"]
