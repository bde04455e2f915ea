"""From the first signal to the end."""

import asyncio
import os
import signal

from router.ending import Ending
from tests.router.running import until


async def test_without_a_delay_the_first_signal_ends_it_and_the_next_one_hurries():
    ending = Ending(0.0)
    waiting = asyncio.create_task(ending.wait())
    with ending.signals(lambda: None):
        assert not ending.leaving
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(waiting, 5)
        assert (ending.leaving, ending.hurry.is_set()) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(ending.hurry.wait(), 5)


async def test_with_a_delay_it_is_leaving_at_once_and_over_later():
    ending = Ending(0.05)
    waiting = asyncio.create_task(ending.wait())
    ending.ask()
    await asyncio.sleep(0)
    assert (ending.leaving, waiting.done()) == (True, False)
    await asyncio.wait_for(waiting, 5)
    assert not ending.hurry.is_set()


async def test_a_second_signal_or_an_interrupt_ends_the_delay():
    second, interrupt = Ending(3600.0), Ending(3600.0)
    second.ask()
    second.ask()
    with interrupt.signals(lambda: None):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(asyncio.gather(second.wait(), interrupt.wait()), 5)
    assert not second.hurry.is_set()


async def test_a_hangup_does_not_end_it():
    ending, heard = Ending(0.0), []
    with ending.signals(lambda: heard.append(1)):
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: heard)
    assert not ending.leaving
