"""The base of all lists that people only read: who may view them is a permission of its own."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from django.contrib import admin
from django.contrib.admin import FieldListFilter, ShowFacets
from django.http import HttpRequest, HttpResponse
from django.utils.text import capfirst

from streams import display


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Nobody adds, changes or deletes these by hand; who may view them is a permission of its own.

    Django keeps no log of such rows, so their pages offer none.
    """

    list_per_page = 100
    show_full_result_count = False
    show_facets = ShowFacets.NEVER  # counting long tables takes longer than showing them
    change_form_template = "admin/readonly_form.html"
    actions: tuple[str, ...] | None = None

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        title = capfirst(self.opts.verbose_name_plural)
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    @admin.display(description="time (UTC)", ordering="at")
    def when(self, row: Any) -> str:
        """For rows that have an `at`."""
        return display.exact(row.at)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class _Titled(FieldListFilter):
    """Django's filter for the field, under another title."""

    shown_title: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made: Any = FieldListFilter.create(*args, **kwargs)
        made.title = cls.shown_title
        return made  # type: ignore[no-any-return]  # not a _Titled, so that its __init__ is not called again


def titled(field: str, title: str) -> tuple[str, type[FieldListFilter]]:
    """An entry of `list_filter`: filters by `field` and is called “By `title`”."""
    return field, type("Titled", (_Titled,), {"shown_title": title})
