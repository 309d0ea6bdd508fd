"""Predicts prefill and decode times of an instance from the profile that it registers with.

An engine measures itself and registers rows of measurements; a least-squares fit turns them into

    ttft(n) = a0 + a1*n + a2*n^2                                   n: prompt tokens
    tpot(batch, total_tokens) = b0 + b1*batch + b2*total_tokens    batch: requests being decoded

with times in milliseconds. Rows are `(tokens, ms)` for the first, `(avg_len, batch, ms)` for the
second, where `batch * (avg_len - 1)` stands for the total tokens. Rows that do not determine all
three coefficients (too few, or too much alike) get the least-squares solution with the smallest
coefficients, which still goes as close to them as can be. Only without a usable row the prediction is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

COEFFICIENTS: Final = 3


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of one fit; all zero when there was no usable row."""

    constant: float = 0.0
    first: float = 0.0
    second: float = 0.0
    rows: int = 0
    """Usable rows that went into the fit."""


NO_FIT: Final = Fit()


@dataclass(frozen=True, slots=True)
class Predictor:
    """What one instance's profile predicts, in milliseconds; never negative, never NaN."""

    ttft_fit: Fit = NO_FIT
    tpot_fit: Fit = NO_FIT

    def ttft(self, tokens: int) -> float:
        """Time to the first token of a prompt of `tokens` tokens."""
        fit = self.ttft_fit
        return _plausible(fit.constant + fit.first * tokens + fit.second * tokens * tokens)

    def tpot(self, *, batch: int, total_tokens: int) -> float:
        """Time per output token while `batch` requests with `total_tokens` tokens are decoded."""
        fit = self.tpot_fit
        return _plausible(fit.constant + fit.first * batch + fit.second * total_tokens)


def fit_predictor(
    ttft_rows: Iterable[Sequence[float]] = (), tpot_rows: Iterable[Sequence[float]] = ()
) -> Predictor:
    """Fit both models. Rows of the wrong width or with values that are not finite are left out."""
    tokens, ttft_ms = _usable(ttft_rows, width=2)
    lengths, batch, tpot_ms = _usable(tpot_rows, width=3)
    with np.errstate(over="ignore"):  # a square too large for a float is sorted out by the fit
        return Predictor(
            ttft_fit=_least_squares((np.ones_like(tokens), tokens, tokens**2), ttft_ms),
            tpot_fit=_least_squares((np.ones_like(batch), batch, batch * (lengths - 1.0)), tpot_ms),
        )


def _plausible(milliseconds: float) -> float:
    """A parabola through noisy rows may dip below zero or, far outside them, overflow."""
    return milliseconds if 0.0 <= milliseconds < math.inf else 0.0


def _usable(rows: Iterable[Sequence[float]], width: int) -> npt.NDArray[np.float64]:
    """The columns of the rows that can be used."""
    kept = [row for row in map(_floats, rows) if len(row) == width and all(map(math.isfinite, row))]
    return np.array(kept, dtype=np.float64).reshape(len(kept), width).T


def _floats(row: Sequence[float]) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in row)
    except (TypeError, ValueError, OverflowError):
        return ()


def _least_squares(columns: Sequence[npt.NDArray[np.float64]], target: npt.NDArray[np.float64]) -> Fit:
    matrix = np.column_stack(columns)
    finite = np.isfinite(matrix).all(axis=1)
    matrix, target = matrix[finite], target[finite]
    if not len(target):
        return NO_FIT
    try:
        coefficients = _solve(matrix, target)
    except np.linalg.LinAlgError:
        return NO_FIT
    if not np.isfinite(coefficients).all():
        return NO_FIT
    constant, first, second = (float(value) for value in coefficients)
    return Fit(constant, first, second, rows=len(target))


def _solve(matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Columns differ by a factor of 1e10 (1 against n^2). Where there is one solution only, it is found
    more exactly with columns of one size; which of many is the smallest depends on their real size."""
    scale = np.abs(matrix).max(axis=0)
    if scale.all():
        solution, _, rank, _ = np.linalg.lstsq(matrix / scale, target, rcond=1e-10)
        if rank == COEFFICIENTS:
            return np.asarray(solution / scale, dtype=np.float64)
    return np.asarray(np.linalg.lstsq(matrix, target, rcond=None)[0], dtype=np.float64)
