"""Fits of registered profiles: exact data, worked numbers, and data that says nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing.predictors import Predictor, fit_predictor


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
        [(math.nan, 1.0), (math.inf, 2.0), (3, math.nan)],
        [(1, 2, 3), (2,), ()],
        [("a", "b"), (None, 1), (object(), 2)],
        [(1e200, 1.0), (2e200, 2.0), (3e200, 3.0)],
        [(10**400, 1.0)],
    ],
)
def test_ttft_without_a_usable_row_is_zero(rows):
    assert fit_predictor(rows).ttft(1000) == 0.0
    assert fit_predictor(rows).ttft_fit.rows == 0
    assert Predictor().ttft(1000) == Predictor().tpot(batch=1, total_tokens=1) == 0.0


UNDETERMINED_TTFT = [
    [(512, 31.0)],
    [(512, 31.0), (1024, 55.5)],  # two points do not make a parabola
    [(512, 31.0)] * 5,
    [(512, 31.0), (512, 33.0), (1024, 55.5), (1024, 56.5)],
    [(0, 1.0), (0, 2.0), (0, 3.0)],
]


@pytest.mark.parametrize("rows", UNDETERMINED_TTFT)
def test_ttft_of_rows_that_do_not_determine_a_parabola_is_the_smallest_least_squares_fit(rows):
    predictor = fit_predictor(rows)
    n, ms = np.array(rows, dtype=float).T
    # The solution of minimum norm is what the pseudo-inverse makes of the times.
    expected = np.linalg.pinv(np.column_stack([np.ones_like(n), n, n * n])) @ ms
    for tokens in (0, 512, 700, 1024, 3000):
        smooth = float(expected @ [1.0, tokens, tokens * tokens])
        assert predictor.ttft(tokens) == pytest.approx(max(smooth, 0.0), rel=1e-6, abs=1e-9)
    for tokens in set(n):
        assert predictor.ttft(int(tokens)) == pytest.approx(float(ms[n == tokens].mean()))


def test_one_ttft_row_grows_with_the_prompt():
    # (1, n, n^2) is scaled so that it meets 31 ms at 512 tokens: n^2 carries nearly all of it
    predictor = fit_predictor([(512, 31.0)])
    assert predictor.ttft(512) == pytest.approx(31.0)
    assert predictor.ttft(1024) == pytest.approx(124.0, rel=1e-3)
    assert predictor.ttft(256) == pytest.approx(7.75, rel=5e-3)


UNDETERMINED_TPOT = [
    [(513, b, 20.0 + b) for b in (1, 2, 4, 8)],  # batch and total tokens move together
    [(length, 8, 5 + length / 100) for length in (10, 20, 30, 40)],
    [(512, 8, 21.0)],
    [(1, 1, 7.0), (1, 2, 9.0)],  # nobody has any tokens
]


@pytest.mark.parametrize("rows", UNDETERMINED_TPOT)
def test_tpot_of_rows_that_do_not_determine_a_plane_is_the_smallest_least_squares_fit(rows):
    predictor = fit_predictor((), rows)
    length, batch, ms = np.array(rows, dtype=float).T
    matrix = np.column_stack([np.ones_like(batch), batch, batch * (length - 1)])
    expected = np.linalg.pinv(matrix) @ ms
    for number, total in ((1, 0), (4, 100), (8, 4088), (16, 9000)):
        smooth = float(expected @ [1.0, number, total])
        assert predictor.tpot(batch=number, total_tokens=total) == pytest.approx(max(smooth, 0.0), rel=1e-6)
    for row, total in zip(rows, matrix[:, 2], strict=True):
        assert predictor.tpot(batch=row[1], total_tokens=int(total)) == pytest.approx(row[2])


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
