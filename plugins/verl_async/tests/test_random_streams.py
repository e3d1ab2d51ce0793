from __future__ import annotations

import numpy as np

from verl_async.rollout.random_streams import uniform_numbers


def test_numbers_are_those_of_numpys_philox_keyed_by_the_seed() -> None:
    numbers = uniform_numbers([7, 2**70 + 3], [0, 0], 9)
    for row, seed in zip(numbers, [7, 2**70 + 3], strict=True):
        assert (row == np.random.Generator(np.random.Philox(key=seed)).random(9)).all()


def test_each_number_belongs_to_its_position() -> None:
    whole = uniform_numbers([5], [0], 20)[0]
    for start in range(12):
        assert (uniform_numbers([4, 5], [3, start], 8)[1] == whole[start : start + 8]).all()


def test_streams_of_neighbouring_seeds_are_uncorrelated() -> None:
    numbers = uniform_numbers(range(200), [0] * 200, 500)
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.01
    assert abs(numbers.mean() - 0.5) < 0.005
