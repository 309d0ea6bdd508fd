"""Whether the database is there and prepared, asked once before anything starts."""

from __future__ import annotations

import logging
import os.path
import sqlite3

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

log = logging.getLogger(__name__)

_SQLITE_PASSES = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
"""What SQLite says while another process holds its lock. Everything else that a file cannot do at the
start it will not do later either."""


class UnusableDatabaseError(Exception):
    """The portal cannot work with this database; the sentence says why, and what helps."""


def missing_migrations() -> list[str]:
    """Names of migrations that the database lacks, in order. Raises django.db.Error when it cannot be
    asked. A file that does not exist is not made by asking."""
    connection = connections[DEFAULT_DB_ALIAS]
    path = _sqlite_path()
    if path is not None and not os.path.exists(path):
        return _every_migration()
    try:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        return [f"{migration.app_label}.{migration.name}" for migration, _ in plan]
    finally:
        connection.close()


def _every_migration() -> list[str]:
    graph = MigrationLoader(None).graph
    plan = dict.fromkeys(node for leaf in graph.leaf_nodes() for node in graph.forwards_plan(leaf))
    return [f"{app}.{name}" for app, name in plan]


def require_migrated() -> None:
    """Raises UnusableDatabaseError when migrations are missing, or when a file is no SQLite database.

    A database that does not answer is only reported: routing and queries do not need it, and a portal
    that restarts while the database is away must come up.
    """
    try:
        missing = missing_migrations()
    except Error as error:
        reason = why_unusable(error)
        if reason is not None:
            raise UnusableDatabaseError(reason) from error
        log.error(
            "the database does not answer (%s); the portal starts without it: no sign-in, no history",
            first_line(error),
        )
        return
    if missing:
        raise UnusableDatabaseError(
            f"the database lacks {len(missing)} migrations ({missing[0]}, …): "
            "run manage.py migrate --noinput, then start again"
        )


def why_unusable(error: Error) -> str | None:
    """Why trying again would not help, in a sentence; None when it might."""
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    if code is None or code & 0xFF in _SQLITE_PASSES:  # an extended code has the plain one in its last byte
        return None
    return (
        f"the database {_sqlite_path()} cannot be used ({first_line(error)}): restore it, or move it away "
        "and run manage.py migrate --noinput, or set KVPORTAL_DATABASE_URL"
    )


def _sqlite_path() -> str | None:
    """The database's file; None for other databases, and for those that SQLite keeps in memory."""
    connection = connections[DEFAULT_DB_ALIAS]
    name = str(connection.settings_dict["NAME"])
    return name if connection.vendor == "sqlite" and os.path.isabs(name) else None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
