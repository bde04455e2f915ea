import json

import pytest

from router.policy.book import CONFIGURED, CoefficientBook
from router.policy.cost import Rates
from router.policy.fit import PrefillFit
from schemas.settings import SettingsError
from tests.router.policy.test_fit import TRUE, outcomes

NOW_S = 1_796_022_000.0


def book(**given):
    return CoefficientBook(Rates(), {"h100": Rates(a=4e-5)}, wall_clock=lambda: NOW_S, **given)


def learn(made, pool="p", hardware="h100", n=300, rates=TRUE, seed=0):
    entry = made.entry(pool, hardware)
    for uncached, cached, seconds in outcomes(n, seed, rates=rates):
        entry.window.observe(int(uncached + cached), int(cached), float(seconds))
    for due in made.refits():
        made.look(due)
    return entry


def test_without_a_fit_each_hardware_has_what_is_configured():
    made = book()
    assert made.in_use("p", "h100").rates == Rates(a=4e-5)
    assert made.in_use("p", None).rates == made.in_use("q", "l4").rates == Rates()
    assert made.in_use("p", None).name == CONFIGURED


def test_a_fit_is_shown_and_not_used():
    made = book()
    entry = learn(made)
    newest = entry.versions[-1]
    assert newest.name.startswith("fit-2-20261130T")
    assert isinstance(newest.fit, PrefillFit)
    assert newest.rates.a == pytest.approx(TRUE.a, rel=0.1)
    assert newest.rates.c1 == Rates().c1, "only the prefill is fitted"
    assert made.in_use("p", "h100").name == CONFIGURED
    assert made.edition == 0
    (page,) = made.page()
    assert (page["in_use"], page["versions"][-1]["version"], page["observations"]) == (CONFIGURED, newest.name, 300)


def test_a_fit_is_of_its_pool_and_hardware_alone():
    made = book(adopt_fits=True)
    learn(made)
    assert made.in_use("p", "h100").name != CONFIGURED
    assert made.in_use("p", None).name == made.in_use("q", "h100").name == CONFIGURED


def test_an_operator_adopts_and_takes_back():
    made = book()
    name = learn(made).versions[-1].name
    made.adopt("p", "h100", name)
    assert made.in_use("p", "h100").name == name
    assert made.edition == 1
    made.adopt("p", "h100", CONFIGURED)
    assert made.in_use("p", "h100").name == CONFIGURED
    with pytest.raises(ValueError, match=r"no version 'fit-9'; there are configured-1, fit-2"):
        made.adopt("p", "h100", "fit-9")
    with pytest.raises(ValueError, match="there are p/h100"):
        made.adopt("p", "l4", CONFIGURED)


def test_an_operators_choice_holds_though_newer_fits_come():
    made = book(adopt_fits=True)
    name = learn(made).versions[-1].name
    made.adopt("p", "h100", name)
    for i in range(8):
        learn(made, n=1100, rates=Rates(0.02, TRUE.a * 1.5 ** (i + 1), TRUE.b * 1.5 ** (i + 1)), seed=i)
    assert made.in_use("p", "h100").name == name
    (entry,) = made
    assert entry.versions[-1].name.startswith("fit-10-")
    assert len(entry.versions) <= 7, "old ones are let go, but for what is configured and what is chosen"


def test_versions_and_choice_outlive_a_restart(tmp_path):
    file = tmp_path / "state" / "fits.json"
    made = book(file=file)
    name = learn(made).versions[-1].name
    made.adopt("p", "h100", name)
    again = book(file=file)
    assert again.in_use("p", "h100") == made.in_use("p", "h100")
    learn(again, n=1100, rates=Rates(0.1, 3e-4, 9e-9), seed=9)
    assert again.entry("p", "h100").versions[-1].name.startswith("fit-3-")
    assert [p.name for p in file.parent.iterdir()] == ["fits.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "move it away"),
        ('{"version": 2, "entries": []}', "version"),
        ('{"version": 1, "entries": [{"pool": "p", "hardware": null, "chosen": "fit-9-x", "fits": []}]}', "fit-9-x"),
        (json.dumps({"version": 1, "entries": [{"pool": "p", "hardware": None, "chosen": None, "fits": [{"version": "fit-2-x"}]}]}), "a"),
    ],
)
def test_a_file_that_is_not_ours_stops_the_start(tmp_path, content, says):
    file = tmp_path / "fits.json"
    file.write_text(content)
    with pytest.raises(SettingsError, match="fits_file") as e:
        book(file=file)
    assert says in str(e.value)


def test_a_file_that_cannot_be_written_is_told_and_hurts_nothing(tmp_path, caplog):
    (tmp_path / "taken").write_text("a file where a folder should be")
    made = book()
    made._file = tmp_path / "taken" / "fits.json"
    name = learn(made).versions[-1].name
    assert made.write_failures == 1
    assert "cannot be written" in caplog.text
    assert made.entry("p", "h100").version(name) is not None


def test_a_look_needs_news():
    made = book()
    learn(made)
    assert made.refits() == []
    entry = learn(made, n=49)
    assert made.refits() == []
    learn(made, n=1)
    assert entry.looked_at == 350
    assert entry.refusal is not None
