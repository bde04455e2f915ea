"""Which prefill coefficients there are for each (pool, hardware), in versions, and which are in use.

    configured-1                      from the settings
    fit-N-YYYYMMDDTHHMMSS             N counts on from it; fitted from outcomes (fit.py)

A fit is used for choosing only when the setting `adopt_fits` says so or an operator adopts it: a router that believes what its own choices
brought about can talk itself into anything. Until then it is shown, beside its errors. With a file the versions and what operators adopted
outlive a restart; a file that can't be read stops the start, one that can't be written is told and tried again at the next version.

What is decided by the operator is kept apart from what is on: with `adopt_fits` the newest fit is on, unless an operator chose otherwise.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.policy.cost import Rates
from router.policy.fit import PrefillFit, Refusal, Window, new_fit
from schemas.settings import SettingsError, explain

log = logging.getLogger(__name__)

CONFIGURED = "configured-1"
_KEPT = 5
_NEW_BEFORE_REFIT = 50


@dataclass(frozen=True, slots=True)
class Version:
    name: str
    rates: Rates
    fit: PrefillFit | None = None  # None: configured
    fitted_at_s: float | None = None  # unix seconds


@dataclass(slots=True)
class Entry:
    """One pool's one kind of hardware. versions: configured, then fits, oldest first."""

    pool: str
    hardware: str | None
    versions: list[Version]
    chosen: str | None = None  # by an operator
    window: Window = field(default_factory=Window)
    fits: int = 1  # number in the newest version's name
    looked_at: int = 0  # observations seen at the newest look
    refusal: Refusal | None = None  # of the newest look

    def version(self, name: str) -> Version | None:
        return next((v for v in self.versions if v.name == name), None)


class CoefficientBook:
    """For one thread (`refits` and `settle` split a fit, so that it can be computed elsewhere)."""

    def __init__(
        self,
        configured: Rates,
        by_hardware: Mapping[str, Rates] | None = None,
        adopt_fits: bool = False,
        file: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises SettingsError when there is a file that is not what it should be."""
        self._configured, self._by_hardware, self._adopt_fits = configured, dict(by_hardware or {}), adopt_fits
        self._file, self._wall_clock = file, wall_clock
        self._entries: dict[tuple[str, str | None], Entry] = {}
        self.edition = 0
        """Grows when what is in use changes: who keeps rates by worker looks here."""
        self.write_failures = 0
        if file is not None and file.exists():
            self._read(file)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def entry(self, pool: str, hardware: str | None) -> Entry:
        found = self._entries.get((pool, hardware))
        if found is None:
            rates = self._by_hardware.get(hardware, self._configured) if hardware is not None else self._configured
            found = self._entries[pool, hardware] = Entry(pool, hardware, [Version(CONFIGURED, rates)])
        return found

    def in_use(self, pool: str, hardware: str | None) -> Version:
        entry = self.entry(pool, hardware)
        return (entry.chosen and entry.version(entry.chosen)) or entry.versions[-1 if self._adopt_fits else 0]

    def adopt(self, pool: str, hardware: str | None, version: str) -> None:
        """An operator's choice; it holds until the next one. Raises ValueError that says what there is."""
        entry = self._entries.get((pool, hardware))
        if entry is None:
            known = ", ".join(f"{e.pool}/{e.hardware or 'no label'}" for e in self)
            raise ValueError(f"there are no coefficients of pool {pool!r} and hardware {hardware!r}; there are {known or 'none yet'}")
        if entry.version(version) is None:
            raise ValueError(f"there is no version {version!r}; there are {', '.join(v.name for v in entry.versions)}")
        log.info("pool %s, hardware %s: the cost model uses %s from now on", pool, hardware, version)
        entry.chosen = version
        self.edition += 1
        self._write()

    def refits(self) -> list[Entry]:
        """Those with enough news for another look."""
        return [e for e in self if e.window.seen - e.looked_at >= _NEW_BEFORE_REFIT]

    def look(self, entry: Entry) -> None:
        """Fits anew, in one go: about 5 to 10 ms."""
        self.settle(entry, new_fit(entry.window.rows(), self.reference(entry)))

    def reference(self, entry: Entry) -> Rates:
        """What a new fit has to beat: the newest version."""
        return entry.versions[-1].rates

    def settle(self, entry: Entry, found: PrefillFit | Refusal) -> None:
        """The result of a look at `entry.window`."""
        entry.looked_at = entry.window.seen
        if isinstance(found, Refusal):
            entry.refusal = found
            return
        entry.refusal = None
        entry.fits += 1
        at_s = self._wall_clock()
        name = f"fit-{entry.fits}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(at_s))}"
        rates = replace(entry.versions[0].rates, base_s=found.base_s, a=found.a, b=found.b)
        entry.versions.append(Version(name, rates, found, at_s))
        self._trim(entry)
        log.info(
            "pool %s, hardware %s: %s from %d outcomes: %.4f s + %.3g s a token + %.3g s a pair, median error %.1f %% (before %.1f %%)%s",
            entry.pool, entry.hardware, name, found.n, found.base_s, found.a, found.b, 100 * found.error_p50, 100 * found.error_p50_before,
            "" if self.in_use(entry.pool, entry.hardware).name == name else "; not used for choosing",
        )  # fmt: skip
        if self._adopt_fits:
            self.edition += 1
        self._write()

    def page(self) -> list[dict[str, Any]]:
        """For people: JSON-able."""
        return [
            {
                "pool": e.pool,
                "hardware": e.hardware,
                "in_use": self.in_use(e.pool, e.hardware).name,
                "chosen_by_operator": e.chosen is not None,
                "observations": e.window.seen,
                "useless_outcomes": dict(e.window.useless),
                "newest_look": "too few news" if not e.looked_at else "a new version" if e.refusal is None else e.refusal.text,
                "versions": [_version_json(v) for v in e.versions],
            }
            for e in self
        ]

    def _trim(self, entry: Entry) -> None:
        """Keeps what is configured, the newest `_KEPT` fits, and what an operator chose."""
        keep = {CONFIGURED, entry.chosen, *(v.name for v in entry.versions[-_KEPT:])}
        entry.versions = [v for v in entry.versions if v.name in keep]

    def _write(self) -> None:
        if self._file is None:
            return
        entries = [
            {
                "pool": e.pool,
                "hardware": e.hardware,
                "chosen": e.chosen,
                "fits": [_version_json(v) for v in e.versions if v.fit is not None],
            }
            for e in self
            if len(e.versions) > 1 or e.chosen is not None
        ]
        draft = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(orjson.dumps({"version": 1, "entries": entries}, option=orjson.OPT_INDENT_2))
            draft.replace(self._file)
        except OSError as e:
            self.write_failures += 1
            log.warning("the fits file %s cannot be written (%s): a restart would forget the newest version", self._file, e.strerror)

    def _read(self, file: Path) -> None:
        try:
            content = _File.model_validate_json(file.read_bytes())
        except OSError as e:
            raise SettingsError(f"setting `fits_file`: {file} cannot be read: {e.strerror}") from e
        except ValidationError as e:
            raise SettingsError(
                f"setting `fits_file`: {file} is not what this router writes; move it away to begin anew:\n{explain(e)}"
            ) from e
        for found in content.entries:
            entry = self.entry(found.pool, found.hardware)
            for v in found.fits:
                fit = PrefillFit(v.base_s, v.a, v.b, v.se, v.n, v.error_p50, v.error_p90, v.error_p50_before, v.garbage)
                rates = replace(entry.versions[0].rates, base_s=v.base_s, a=v.a, b=v.b)
                entry.versions.append(Version(v.version, rates, fit, v.fitted_at_s))
                entry.fits = max(entry.fits, int(v.version.split("-")[1]))
            if found.chosen is not None and entry.version(found.chosen) is None:
                raise SettingsError(
                    f"setting `fits_file`: {file} chooses {found.chosen!r} for pool {found.pool!r}, a version that it lacks"
                )
            entry.chosen = found.chosen


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _FitJson(_Strict):
    version: str = Field(pattern=r"^fit-\d+-\w+$")
    base_s: float = Field(ge=0)
    a: float = Field(ge=0)
    b: float = Field(ge=0)
    se: tuple[float | None, float | None, float | None]
    n: int
    error_p50: float
    error_p90: float
    error_p50_before: float
    garbage: float
    fitted_at_s: float


class _EntryJson(_Strict):
    pool: str
    hardware: str | None
    chosen: str | None
    fits: tuple[_FitJson, ...]


class _File(_Strict):
    version: Literal[1]
    entries: tuple[_EntryJson, ...]


def _version_json(v: Version) -> dict[str, Any]:
    if v.fit is None:
        return {"version": v.name, "base_s": v.rates.base_s, "a": v.rates.a, "b": v.rates.b}
    return {"version": v.name, **asdict(v.fit), "fitted_at_s": v.fitted_at_s}
