"""Whether the database is there and prepared, asked once before anything starts."""

from __future__ import annotations

import logging

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.migrations.executor import MigrationExecutor

log = logging.getLogger(__name__)


class UnmigratedError(Exception):
    """The database is not prepared for this version; the sentence names the command that does it."""


def missing_migrations() -> list[str]:
    """Names of migrations that the database lacks, in order. Raises django.db.Error when it cannot be
    asked."""
    connection = connections[DEFAULT_DB_ALIAS]
    try:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        return [f"{migration.app_label}.{migration.name}" for migration, _ in plan]
    finally:
        connection.close()


def require_migrated() -> None:
    """Raises UnmigratedError when migrations are missing.

    A database that does not answer is only reported: routing and queries do not need it, and a portal
    that restarts while the database is away must come up.
    """
    try:
        missing = missing_migrations()
    except Error as error:
        log.error(
            "the database does not answer (%s); the portal starts without it: no sign-in, no history",
            first_line(error),
        )
        return
    if missing:
        raise UnmigratedError(
            f"the database lacks {len(missing)} migrations ({missing[0]}, …): "
            "run manage.py migrate --noinput, then start again"
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
