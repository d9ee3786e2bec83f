"""Where boxes meet, held against arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.layout.boxes import Region, meet, within


def _region(data: Any, shape: tuple[int, ...]) -> Region:
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    return start, tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, shape))


@given(st.data())
def test_what_two_regions_share(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    a, b = _region(data, shape), _region(data, shape)
    array, origin = np.arange(np.prod(shape, dtype=int)).reshape(shape), (0,) * len(shape)
    first, second = array[within(a, origin)], array[within(b, origin)]
    common = meet(a, b)
    assert common == meet(b, a)
    if common is None:
        assert not np.intersect1d(first, second).size
    else:
        assert np.array_equal(first[within(common, a[0])], second[within(common, b[0])])
        assert sorted(first[within(common, a[0])].flat) == np.intersect1d(first, second).tolist()


def test_scalars_meet_and_touching_does_not() -> None:
    assert meet(((), ()), ((), ())) == ((), ())
    assert meet(((0, 0), (2, 3)), ((2, 0), (1, 3))) is None
    assert meet(((0, 1), (2, 3)), ((1, 0), (4, 2))) == ((1, 1), (1, 1))
