"""The list of streams joined with what is in memory: live states, and which streams are followed at all.

The join costs no query for each row: however many streams a page lists, the number of queries is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest

from streams.console import console
from streams.models import Stream
from streams.spec import StreamId
from streams.status import StreamState, StreamStatus

NOT_FOLLOWED, ALL = "not_followed", "all"


def live_statuses() -> dict[StreamId, StreamStatus]:
    return {status.spec.id: status for status in console().statuses() or ()}


def is_followed(row: Stream, followed: Collection[StreamId] | None) -> bool | None:
    """Whether a replica follows the stream now; None where nobody can tell. `followed`: the console's."""
    return None if followed is None else row.stream_id in followed


class LiveStateFilter(admin.SimpleListFilter):
    """Filters by the state that is in memory now. Without a choice: what is followed."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        states = ((str(state), str(state)) for state in StreamState)
        return [*states, (NOT_FOLLOWED, "no longer followed"), (ALL, "all")]

    def choices(self, changelist: Any) -> Any:
        """The same without Django's “All”, which is not what is shown without a choice."""
        for value, title in ((None, "followed now"), *self.lookup_choices):
            query = changelist.get_query_string({self.parameter_name: value})
            yield {"selected": self.value() == value, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Stream]) -> QuerySet[Stream]:
        chosen = self.value()
        if chosen == ALL:
            return queryset
        if chosen in (None, NOT_FOLLOWED):
            return _by_followed(queryset, following=chosen is None)
        statuses = live_statuses().items()
        return queryset.filter(rows_of(stream for stream, status in statuses if status.state == chosen))


def _by_followed(queryset: QuerySet[Stream], *, following: bool) -> QuerySet[Stream]:
    """Where nobody can tell, every stream may be one that is followed."""
    followed = console().followed()
    if followed is None:
        return queryset if following else queryset.none()
    return queryset.filter(rows_of(followed)) if following else queryset.exclude(rows_of(followed))


class LiveChangeList(ChangeList):
    """A change list whose rows carry their live status (`row.live`, None when this process does not follow
    it) and whether any replica follows them (`row.followed`, None when nobody can tell)."""

    gone_num = 0
    """Rows that only the default filter leaves out, because nobody follows them any more."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        statuses, followed = live_statuses(), console().followed()
        for row in self.result_list:
            row.live = statuses.get(row.stream_id)
            row.followed = is_followed(row, followed)
        if followed is not None and LiveStateFilter.parameter_name not in self.params:
            gone = self.root_queryset.exclude(rows_of(followed))
            self.gone_num = self.model_admin.get_search_results(request, gone, self.query)[0].count()

    @property
    def gone_url(self) -> str:
        """The same list with the rows that are left out."""
        return self.get_query_string({LiveStateFilter.parameter_name: NOT_FOLLOWED})


def rows_of(streams: Iterable[StreamId]) -> Q:
    """The rows of these streams, one term for each instance."""
    ranks: dict[str, list[int]] = {}
    for stream in streams:
        ranks.setdefault(stream.instance_name, []).append(stream.dp_rank)
    condition = Q(pk__in=())
    for name, found in ranks.items():
        condition |= Q(instance_name=name, dp_rank__in=found)
    return condition
