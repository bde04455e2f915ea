"""`warmwatch bridge`: settings in, exit status out."""

from __future__ import annotations

import asyncio
import signal

from collector.bridge.app import Bridge
from collector.bridge.settings import BridgeSettings
from schemas.fleet import load_fleet
from schemas.settings import SettingsError
from schemas.stream import BadStreamUrl, open_stream


def run(settings: BridgeSettings) -> int:
    """Runs until SIGINT or SIGTERM, hands over what waits, and returns 0. Raises SettingsError for a wrong setting."""
    return asyncio.run(_run(settings))


async def _run(settings: BridgeSettings) -> int:
    fleet = load_fleet(settings.fleet)
    try:
        stream = open_stream(settings.stream)
    except BadStreamUrl as e:
        raise SettingsError(f"setting `stream`: {e}") from e
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with stream:
        async with Bridge(settings, fleet, stream) as bridge:
            print(f"READY metrics=http://{settings.metrics_host}:{bridge.metrics_port}", flush=True)
            await stop.wait()
    return 0
