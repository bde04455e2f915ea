"""After warming up, a request and its events meet no kernel that has yet to be compiled."""

import subprocess
import sys

CODE = """
import numba
import numpy as np
from router.index import kernels
from router.index.prefix_index import PrefixIndex
from schemas.kv_events import EVENT, Kind, KvBatch, WorkerId
from router.policy import cost
from router.records import candidates
from router.warm_up import warm_up
warm_up()
modules = (kernels, cost, candidates)
compiled = {f for m in modules for f in vars(m).values() if isinstance(f, numba.core.dispatcher.Dispatcher) and f.signatures}
before = {f.py_func.__name__: len(f.signatures) for f in compiled}
missing = {"apply", "match", "settle", "sets_of", "store_all", "remove_all", "clear", "link_all", "_listed"} - set(before)
assert not missing, missing
warm_up()
index = PrefixIndex()
for writable in (True, False):  # names come from the stream, from other routers, from prompts
    names = np.arange(1, 50, dtype=np.uint64)
    names.flags.writeable = writable
    index.drop(index.expect(0, names, 1.0))
    events = np.array([(Kind.STORED, 0, group, 7, 1, 0.0, 0, 16 << group, 0) for group in range(2)], EVENT)
    index.apply(KvBatch(WorkerId("p", "w", 0), 1, 1, 1, 0.0, 0.0, events, names[:14]), 0.0)
    index.match(names, 0.0, {32: names})
assert before == {f.py_func.__name__: len(f.signatures) for f in compiled}
"""


def test_every_kernel_of_the_request_path_is_compiled():
    subprocess.run([sys.executable, "-c", CODE], check=True)
