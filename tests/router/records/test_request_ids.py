from router.records.request_ids import MOST_CHARACTERS, RecordedIds


def test_an_id_that_comes_again_gets_an_ending():
    ids = RecordedIds()
    assert [ids.take("trace") for _ in range(4)] == ["trace", "trace~2", "trace~3", "trace~4"]
    assert ids.take("other") == "other"


def test_an_ending_is_never_an_id_that_a_client_sent():
    ids = RecordedIds()
    assert [ids.take(i) for i in ("a~2", "a", "a", "a~3", "a", "a~2")] == ["a~2", "a", "a~3", "a~3~2", "a~4", "a~2~3"]


def test_without_an_id_each_request_gets_one_of_its_own():
    ids = RecordedIds()
    assert len({ids.take(given) for given in (None, "", None)}) == 3
    assert len(ids) == 0


def test_ids_that_differ_only_beyond_the_bound_of_a_record_are_told_apart():
    ids = RecordedIds()
    found = [ids.take("x" * MOST_CHARACTERS + end) for end in "abc"]
    assert len(set(found)) == 3
    assert all(len(f) <= MOST_CHARACTERS for f in found)


def test_memory_is_bounded_by_the_last_ids():
    ids = RecordedIds(most=10)
    for i in range(1000):
        assert ids.take(f"r{i}") == f"r{i}"
    assert len(ids) == 10
    assert ids.take("r999") == "r999~2"
    assert ids.take("r0") == "r0"
