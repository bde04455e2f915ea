"""What was known of contents is known after a restart."""

import numpy as np

from collector.analytics.content_index import ContentIndex
from collector.analytics.contents_journal import SCHEMA, ContentsJournal
from schemas.block_hash import HashKey
from schemas.content import Content, described

KEY = HashKey(1, 2)


def prompt(seed: int, tokens: int = 200) -> Content:
    return described(KEY, np.random.default_rng(seed).integers(0, 2000, tokens, dtype=np.uint32), 16, 0, None, None)


def test_checkpoint_and_journal_give_the_index_of_an_uninterrupted_run():
    first, second = (ContentsJournal(ContentIndex(100_000)) for _ in range(2))
    first.register(10.0, "p", prompt(1))
    first.written()
    saved = first.save()
    first.register(20.0, "p", prompt(2))
    rows = first.journal(5)
    assert rows.schema == SCHEMA
    second.load(saved)
    second.replay(rows, 4)
    for seed, seen in ((1, True), (2, True), (3, False)):
        told = second.tell(100.0, "p", prompt(seed))
        assert told.run_known.all() == seen
        assert (told.run_known == first.tell(100.0, "p", prompt(seed)).run_known).all()
    assert {k: v.tolist() for k, v in first.save().items()} == {k: v.tolist() for k, v in second.save().items()}


def test_entries_of_the_checkpoint_are_not_taken_again_and_written_ones_not_twice():
    one, other = (ContentsJournal(ContentIndex(100_000)) for _ in range(2))
    one.register(10.0, "p", prompt(1))
    other.replay(one.journal(5), 5)
    assert other.index.entries == 0
    one.written()
    assert one.journal(6).num_rows == 0


def test_a_prompt_that_is_held_whole_leaves_no_entry():
    one = ContentsJournal(ContentIndex(100_000))
    one.register(10.0, "p", described(KEY, np.arange(32, dtype=np.uint32), 16, 2, None, None))
    assert one.journal(1).num_rows == 0
