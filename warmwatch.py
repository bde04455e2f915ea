"""The `warmwatch` command: one subcommand a process or question; each imports its package only when called."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from schemas.settings import EXIT_BAD_SETTINGS, Settings, SettingsError, load


@dataclass(frozen=True)
class Subcommand:
    """Where its settings class and its function live (module:name), and the extra that installs what they need."""

    help: str
    settings: str
    run: str
    extra: str


SUBCOMMANDS: dict[str, Subcommand] = {
    "demo": Subcommand(
        "a fleet of mock workers with everything else, in one command", "simulator.demo:DemoSettings", "simulator.demo:run", "all"
    ),
    "bridge": Subcommand(
        "runs beside workers: KV events and load -> stream",
        "collector.bridge.settings:BridgeSettings",
        "collector.bridge.run:run",
        "bridge",
    ),
    "collect": Subcommand("the stream -> DuckDB", "collector.settings:CollectorSettings", "collector.ingest:run", "collector"),
    "route": Subcommand("prefix-aware OpenAI-compatible router", "router.settings:RouterSettings", "router.app:run", "router"),
    "route-key": Subcommand(
        "makes an API key for the router", "router.access.new_key:RouteKeySettings", "router.access.new_key:run", "router"
    ),
    "dashboard": Subcommand("the dashboard in a browser", "dashboard.settings:DashboardSettings", "dashboard.run:run", "dashboard"),
    "sql": Subcommand("a question to the published database", "schemas.tables.ask:AskSettings", "schemas.tables.ask:run", "collector"),
    "explain": Subcommand(
        "why a request went where it went", "schemas.tables.explain:ExplainSettings", "schemas.tables.explain:run", "collector"
    ),
    "report": Subcommand(
        "where tokens were computed again, why, and what it cost",
        "schemas.tables.report.command:ReportSettings",
        "schemas.tables.report.command:run",
        "collector",
    ),
    "mark": Subcommand("note a change: a deploy, a new prompt, a scale-out", "schemas.mark:MarkSettings", "schemas.mark:run", "bridge"),
    "mock-engine": Subcommand("a mock vLLM server", "simulator.settings:MockEngineSettings", "simulator.mock_worker:run", "all"),
    "traffic": Subcommand("agent traffic against any OpenAI address", "simulator.settings:TrafficSettings", "simulator.traffic:run", "all"),
    "json-schemas": Subcommand(
        "JSON Schemas of the stream's records, for routers of your own", "schemas.export:ExportSettings", "schemas.export:run", "bridge"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns 0, or 1 for trouble while running, or 2 for a wrong setting; the message is on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(metadata.version("warmwatch"))
        return 0
    name, rest = argv[0], argv[1:]
    if name not in SUBCOMMANDS:
        print(f"warmwatch: no subcommand {name!r}; there are {', '.join(SUBCOMMANDS)}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    subcommand = SUBCOMMANDS[name]
    try:
        settings_class = _find(subcommand.settings)
        run = _find(subcommand.run)
    except KeyboardInterrupt:  # importing takes a second or two
        return 128 + signal.SIGINT
    except ModuleNotFoundError as e:
        print(
            f"warmwatch {name}: the package {e.name!r} is not installed; this subcommand needs pip install 'warmwatch[{subcommand.extra}]'",
            file=sys.stderr,
        )
        return EXIT_BAD_SETTINGS
    try:
        settings: Settings = load(settings_class, rest)
        logging.basicConfig(level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("kafka").setLevel(logging.WARNING)  # its connections are news at its info level
        status = int(run(settings) or 0)
        sys.stdout.flush()
        return status
    except SettingsError as e:
        print(f"warmwatch {name}: {e}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 0


def usage() -> str:
    lines = ["usage: warmwatch SUBCOMMAND [--help] [options]", "", __doc__.split(":", 1)[0] + ":", ""]
    lines += [f"  {name:<13} {s.help}" for name, s in SUBCOMMANDS.items()]
    return "\n".join(lines)


def _reader_left() -> bool:
    """True when who read our output has enough of it, such as `head`; what is still to be written goes nowhere then."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # no file, or closed
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    left = bool(poll.poll(0))  # asked for nothing, so what comes is POLLERR: a pipe without a reader
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return left


def _find(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
