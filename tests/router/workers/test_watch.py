"""The fleet file and discovery are looked at while the router runs; what is broken changes nothing and says so."""

import os
import random

import pytest

from router.policy.cost import Coefficients
from router.pools import Pools, TrustRules
from router.workers.membership import Membership
from router.workers.watch import Watch
from schemas.block_hash import HashKey
from schemas.fleet import load_fleet

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
    write(file, "b")
    await watch.look(at_once=True)
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
    await watch.run()
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
