#!/usr/bin/env python
"""Command-line entry: Django's commands and the portal's own (`serve`, `simulate_engine`, ...)."""

from __future__ import annotations

import os
import sys

from kvportal.config.faults import ConfigError, SettingsError


def main() -> None:
    """Runs one command; a wrong configuration ends it with status 2 and one line per fault."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "kvportal.settings")
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ConfigError as error:
        faults = list(error.faults)
        if isinstance(error, SettingsError) and sys.argv[1:2] == ["serve"]:
            # The settings failed before the command was reached: its own faults belong to the same list.
            from kvportal.management.commands.serve import serve_faults

            faults += serve_faults(sys.argv, os.environ)
        sys.stderr.writelines(f"{fault}\n" for fault in faults)
        sys.exit(2)
    except KeyboardInterrupt:  # before a command of ours has taken over the signals
        sys.exit(130)


if __name__ == "__main__":
    main()
