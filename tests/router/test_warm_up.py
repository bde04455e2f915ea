"""After warming up, a request and its events meet no kernel that has yet to be compiled."""

import subprocess
import sys

CODE = """
import numba
from router.index import kernels
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
assert before == {f.py_func.__name__: len(f.signatures) for f in compiled}
"""


def test_every_kernel_of_the_request_path_is_compiled():
    subprocess.run([sys.executable, "-c", CODE], check=True)
