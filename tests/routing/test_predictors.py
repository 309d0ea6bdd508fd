"""Fits of registered profiles: exact data, worked numbers, and data that says nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing.predictors import NO_PREDICTOR, fit_predictor


def test_ttft_recovers_an_exact_parabola():
    rows = [(n, 5.0 + 0.02 * n + 3e-6 * n * n) for n in (128, 512, 2048, 8192, 32768)]
    predictor = fit_predictor(rows)
    for n in (0, 1, 1000, 100_000):
        assert predictor.ttft(n) == pytest.approx(5.0 + 0.02 * n + 3e-6 * n * n, rel=1e-6)


def test_tpot_recovers_an_exact_plane():
    # b0 10, b1 0.5, b2 0.001, with total tokens = batch * (avg_len - 1)
    rows = [
        (length, b, 10 + 0.5 * b + 0.001 * b * (length - 1)) for length in (129, 1025) for b in (1, 8, 32)
    ]
    predictor = fit_predictor((), rows)
    assert predictor.tpot(batch=8, total_tokens=1024) == pytest.approx(15.024)
    assert predictor.tpot(batch=100, total_tokens=50_000) == pytest.approx(110.0)


def test_noisy_rows_get_the_least_squares_fit():
    rows = [(100, 12.0), (200, 20.0), (300, 33.0), (400, 41.0), (500, 55.0)]
    expected = np.polyfit([n for n, _ in rows], [ms for _, ms in rows], 2)
    assert fit_predictor(rows).ttft(350) == pytest.approx(float(np.polyval(expected, 350)))


@pytest.mark.parametrize(
    "rows",
    [
        (),
        [(512, 31.0)],
        [(512, 31.0), (1024, 55.5)],  # two points do not make a parabola
        [(512, 31.0)] * 5,
        [(512, 31.0), (512, 32.0), (1024, 55.5), (1024, 55.5)],
        [(0, 1.0), (0, 2.0), (0, 3.0)],
        [(math.nan, 1.0), (math.inf, 2.0), (3, math.nan), (1, 2.0)],
        [(1, 2, 3), (2,), (), (3, 4.0)],
        [("a", "b"), (None, 1), (object(), 2)],
        [(1e200, 1.0), (2e200, 2.0), (3e200, 3.0)],
        [(10**400, 1.0), (2, 2.0), (3, 3.0)],
    ],
)
def test_ttft_without_a_determined_fit_is_zero(rows):
    assert fit_predictor(rows).ttft(1000) == 0.0


def test_tpot_without_a_determined_fit_is_zero():
    same_length = [(513, b, 20.0 + b) for b in (1, 2, 4, 8)]  # batch and total tokens move together
    same_batch = [(length, 8, length / 100) for length in (10, 20, 30, 40)]
    assert fit_predictor((), same_length).tpot(batch=4, total_tokens=100) == 0.0
    assert fit_predictor((), same_batch).tpot(batch=4, total_tokens=100) == 0.0
    assert fit_predictor((), [(512, 8, 21.0)]).tpot(batch=4, total_tokens=100) == 0.0
    assert NO_PREDICTOR.tpot(batch=1, total_tokens=1) == 0.0


def test_unusable_rows_do_not_spoil_the_rest():
    good = [(n, 1.0 + n) for n in (1, 2, 3, 4)]
    bad = [(math.nan, 1.0), (5, math.inf), (5,), (5, 6, 7)]
    assert fit_predictor([*good, *bad]).ttft(10) == pytest.approx(11.0)
    assert fit_predictor([*good, *bad]).ttft_fit.rows == 4


def test_predictions_are_never_negative():
    predictor = fit_predictor([(100, 0.0), (200, 10.0), (300, 20.0)])
    assert predictor.ttft(300) == pytest.approx(20.0)
    assert predictor.ttft(50) == 0.0


numbers = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.booleans())


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ttft=st.lists(st.lists(numbers, max_size=4), max_size=8),
    tpot=st.lists(st.lists(numbers, max_size=4), max_size=8),
    tokens=st.integers(0, 2**40),
    batch=st.integers(0, 2**20),
)
def test_whatever_is_registered_predictions_are_finite_and_not_negative(ttft, tpot, tokens, batch):
    predictor = fit_predictor(ttft, tpot)
    for value in (predictor.ttft(tokens), predictor.tpot(batch=batch, total_tokens=tokens)):
        assert 0.0 <= value < math.inf
