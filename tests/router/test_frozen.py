import copy
from dataclasses import field, replace

import pytest

from router.frozen import value


@value(eq=True)
class Pair:
    a: int
    b: list[int] = field(default_factory=list, repr=False)


@value()
class Thing:
    a: int


def test_it_is_a_dataclass():
    assert repr(Pair(1, [2])) == "Pair(a=1)"
    assert Pair(1) == Pair(1, []) != Pair(2)
    assert Pair(1).b is not Pair(1).b
    assert replace(Pair(1, [3]), a=2) == Pair(2, [3]) == copy.copy(Pair(2, [3]))


def test_without_eq_it_is_only_itself():
    thing = Thing(1)
    assert thing == thing != Thing(1)
    assert len({thing, Thing(1)}) == 2


def test_it_has_no_other_fields():
    with pytest.raises(AttributeError):
        Pair(1).c = 2
    with pytest.raises(TypeError):
        Pair(1, [], 3)
