"""Paths below the API's prefix. The heartbeat's comes before that of an instance by name."""

from __future__ import annotations

from django.urls import path

from routing.api import views

urlpatterns = [
    path("routing/select", views.SelectView.as_view()),
    path("routing/requests/<path:request_id>/progress", views.ProgressView.as_view()),
    path("instances", views.InstancesView.as_view()),
    path("instances/heartbeat", views.HeartbeatView.as_view()),
    path("instances/<path:name>", views.InstanceView.as_view()),
]
