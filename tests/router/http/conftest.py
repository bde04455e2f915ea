"""These tests run on the router's own kind of loop. (Those of the whole router run on asyncio's.)"""

import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
