"""`manage.py serve`: HTTP, WebSocket, the streams and the index in one process.

Exit status: 0 after a stop that was asked for, 2 for a faulty configuration (one line per fault), 1 for
everything else that keeps it from serving (a busy port, an unmigrated database, ...).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any, NoReturn

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    DjangoHelpFormatter,
    handle_default_options,
)

from kvportal.config.faults import ConfigError, Faults
from kvportal.config.flags import add_flags, flag_texts, hyphenated, variables_help
from kvportal.config.load import build_config
from kvportal.config.model import Config
from kvportal.server.stopping import end_process, lasting_threads

log = logging.getLogger(__name__)


class HelpFormatter(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the epilog. A flag's value is not optional, although a missing one is only
    found when all faults are."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "?" and action.metavar == "VALUE":
            return "VALUE"
        return super()._format_args(action, default_metavar)


class Command(BaseCommand):
    help = "Serves the portal: HTTP, WebSocket, the event streams and the index in one process."
    requires_system_checks: tuple[str, ...] = ()
    requires_migrations_checks = False

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return super().create_parser(
            prog_name,
            subcommand,
            usage="manage.py serve [--check] [flags]",
            epilog=variables_help(),
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            **kwargs,
        )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--check",
            action="store_true",
            help="validate everything, try each endpoint once, print a line for each, and exit",
        )
        add_flags(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """As Django's, but words that no flag takes become faults beside all others."""
        options, config = self.parse(argv, os.environ, Faults())
        handle_default_options(options)
        try:
            self.execute(**{**vars(options), "config": config})
        except CommandError as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(error.returncode)
        if not options.check:
            _leave()

    def parse(self, argv: list[str], environ: Any, faults: Faults) -> tuple[Any, Config]:
        """Django's own options and the configuration. Raises ConfigError, `faults` included."""
        parser = self.create_parser(argv[0], argv[1])
        try:
            options, left_over = parser.parse_known_args(hyphenated(argv[2:]))
        except CommandError as error:  # one of Django's own options: the parser gives up there
            found = str(error).removeprefix("Error: ")
            faults.note("command line", found, "what manage.py serve --help lists")
            raise ConfigError(faults) from None
        texts = flag_texts(vars(options), left_over, faults)
        return options, build_config(texts, environ, faults)

    def handle(self, *args: Any, **options: Any) -> None:
        config: Config = options["config"]
        if options["check"]:
            from kvportal.server.checking import check

            if not check(config, self.stdout):
                raise CommandError("not everything that the portal needs is in order")
            return
        from kvportal.server.running import ServeError, serve

        try:
            serve(config, self.stdout)
        except ServeError as error:
            raise CommandError(str(error)) from error


def _leave() -> NoReturn:
    """End the process after a stop that was asked for. Everything has been written, joined and closed. What
    is left is the interpreter's own end, object by object: on a busy machine that takes longer than the
    five seconds which are promised, and no watchdog runs meanwhile."""
    left = lasting_threads()
    if left:  # most likely one that waits for a database on behalf of somebody's request
        log.warning("the process ends although these are still running: %s", left)
    end_process()


def serve_faults(argv: list[str], environ: Any) -> Faults:
    """The faults of a `serve` command line alone, for a process whose settings are faulty already."""
    faults = Faults()
    try:
        Command().parse(argv, environ, faults)
    except ConfigError:
        return faults
    return faults
