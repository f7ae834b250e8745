"""An engine keeps its latest records under the numbers they always had."""

import pytest

from splash_jax.engine import Records


def filled(count: int, kept: int) -> Records:
    records = Records(kept)
    for i in range(count):
        records.append(i)  # type: ignore[arg-type]
    return records


@pytest.mark.parametrize("kept", [10, 4])
def test_numbers_do_not_change_when_old_ones_go(kept: int) -> None:
    records = filled(10, kept)
    assert len(records) == 10
    assert list(records) == list(range(10 - kept, 10))
    assert (records[8], records[-1]) == (8, 9)
    assert records[7:] == [7, 8, 9] == records[-3:]
    assert records[6:8] == [6, 7]
    assert records[12:] == []


def test_what_is_gone_is_said() -> None:
    records = filled(10, 4)
    assert records[:8] == [6, 7]
    for index in (5, 10, -5):
        with pytest.raises(IndexError, match="is not here: of 10 the latest 4 are kept"):
            records[index]
