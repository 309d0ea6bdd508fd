"""Paths below the API's prefix."""

from __future__ import annotations

from django.urls import path

from streams.api import views

urlpatterns = [
    path("kv-cache/query", views.QueryView.as_view()),
    path("streams", views.StreamsView.as_view()),
    path("streams/resync", views.ResyncView.as_view()),
]
