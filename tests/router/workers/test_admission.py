"""Who waits for a place, for how long, and that no place is lost."""

import asyncio
import random

import pytest

from router.workers.admission import Admission, QueueFull


def admission(places=1, max_waiting=10, max_wait_s=10.0, **given):
    return Admission(lambda: places, max_waiting, max_wait_s, **given)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_limit_nobody_waits():
    a = admission(None)
    assert [await a.enter() for _ in range(100)] == [0.0] * 100
    assert a.waiting == 0


async def test_first_come_first_served_and_nobody_overtakes():
    a, order = admission(), []

    async def one(name):
        await a.enter()
        order.append(name)

    await a.enter()
    tasks = [asyncio.create_task(one(n)) for n in range(5)]
    await settle()
    assert a.waiting == 5
    a.leave()
    late = asyncio.create_task(one("late"))
    await settle()
    for _ in range(5):
        a.leave()
        await settle()
    await asyncio.gather(*tasks, late)
    assert order == [0, 1, 2, 3, 4, "late"]
    a.leave()
    assert (a.inside, a.waiting, a.waited) == (0, 0, 6)


async def test_a_full_queue_is_told_when_to_come_again():
    now = [0.0]
    a = admission(1, max_waiting=2, clock=lambda: now[0])
    await a.enter()
    waiting = [asyncio.create_task(a.enter()) for _ in range(2)]
    await settle()
    with pytest.raises(QueueFull, match="1 requests are at the workers and 2 wait") as e:
        await a.enter()
    assert e.value.retry_after_s == 1  # nothing is known of the pace yet
    for _ in range(60):  # a place each 2 s, for two minutes
        now[0] += 2.0
        a.leave()
        await settle()
        waiting.append(asyncio.create_task(a.enter()))
        await settle()
    with pytest.raises(QueueFull) as e:
        await a.enter()
    assert 5 <= e.value.retry_after_s <= 8  # three ahead and itself, 2 s each
    assert a.refused_full == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_who_waits_too_long_is_told_so():
    a = admission(1, max_wait_s=0.02)
    await a.enter()
    with pytest.raises(QueueFull, match=r"no worker had a place within 0\.02 s") as e:
        await a.enter()
    assert (e.value.waited_s > 0.01, a.waiting, a.inside, a.refused_waited) == (True, 0, 1, 1)
    a.leave()
    assert await a.enter() == 0.0


async def test_a_client_that_leaves_frees_its_place_in_the_queue():
    a = admission()
    await a.enter()
    first, second = (asyncio.create_task(a.enter()) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert a.waiting == 1
    a.leave()
    await second
    a.leave()
    assert (a.inside, a.waiting) == (0, 0)


async def test_a_place_that_comes_to_one_who_leaves_in_that_moment_goes_on():
    a = admission()
    await a.enter()
    first, second = (asyncio.create_task(a.enter()) for _ in range(2))
    await settle()
    a.leave()  # hands the place to first
    first.cancel()
    await settle()
    assert (first.cancelled(), second.done(), a.inside) == (True, True, 1)
    first = asyncio.create_task(a.enter())
    await settle()
    first.cancel()
    a.leave()  # first has been cancelled, but has not run yet
    await settle()
    assert (a.inside, a.waiting) == (0, 0)


async def test_places_that_appear_are_handed_out_when_somebody_looks():
    places = [1]
    a = Admission(lambda: places[0], 10, 10.0)
    await a.enter()
    waiting = [asyncio.create_task(a.enter()) for _ in range(3)]
    await settle()
    places[0] = 3
    a.look()
    await settle()
    assert ([t.done() for t in waiting], a.inside, a.waiting) == ([True, True, False], 3, 1)
    waiting[2].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("seed", range(10))
async def test_no_place_is_lost_and_none_is_given_twice(seed):
    rng, limit = random.Random(seed), 4
    a = admission(limit, max_waiting=8, max_wait_s=0.003)
    inside, most = 0, 0

    async def one():
        nonlocal inside, most
        try:
            await a.enter()
        except QueueFull:
            return
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))
        finally:
            inside -= 1
            a.leave()

    tasks = []
    for _ in range(150):
        tasks.append(asyncio.create_task(one()))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        await asyncio.sleep(rng.choice((0, 0, 0.001)))
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (a.inside, a.waiting, inside) == (0, 0, 0)
    assert 1 <= most <= limit
