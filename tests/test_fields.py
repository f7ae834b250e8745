"""Numbers, times and rows as people's tables have them: exactly what they say, or refused."""

import json
import time

import pytest

from splash_jax.errors import ConfigError
from splash_jax.fields import csv_rows, number, stamp, tokens


@pytest.mark.parametrize(
    ("value", "right"),
    [("12", 12), (" 12 ", 12), ("+12", 12), ("12.0", 12), ("1e3", 1000), ("1.5e1", 15), (12, 12), (12.0, 12), ("0", 0)],
)
def test_a_count_is_what_it_says(value, right):
    assert tokens(value) == right and type(tokens(value)) is int


@pytest.mark.parametrize(
    "value",
    ["", "x", "nan", "inf", "-1", "1.5", "1,024", "1_024", "1 024", "0x10", "１２", "1e99", "1e9999", "9" * 30, "true",
     True, None, [], -1, 1.5, float("nan"), float("inf"), 10**13, 10**400],
    ids=lambda value: repr(value)[:9],
)  # fmt: skip
def test_what_is_no_count_is_refused(value):
    with pytest.raises(ValueError, match=r"is not a number of tokens; write a whole number from 0 to 10+, as 1024"):
        tokens(value)


def test_numbers_are_finite():
    for value, right in (("0.25", 0.25), ("-1e-3", -1e-3), (".5", 0.5), ("7.", 7.0), (3, 3.0), (" 1 ", 1.0)):
        assert number(value) == right
    for value in ("", "nan", "-inf", "1e999", "1,5", "1_0", "١", True, None, float("nan"), 10**400, "0x1"):
        with pytest.raises(ValueError, match="is not a finite number; write it as"):
            number(value)


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Asia/Kathmandu"])
def test_a_moment_is_read_whole_and_alike_in_every_zone(zone, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        at = 1_715_472_001  # 2024-05-12 00:00:01 UTC
        for text, right in (
            ("2024-05-12 00:00:01", (at, 0.0)),
            ("2024-05-12T00:00:01Z", (at, 0.0)),
            ("2024-05-12 00:00:01.00993+00:00", (at, 0.00993)),
            ("2024-05-12 00:00:01,5 UTC", (at, 0.5)),
            ("2024-05-12 02:00:01.1234567+02:00", (at, 0.1234567)),
            ("2024-05-12 02:00:01.123456789012+0200", (at, 0.123456789012)),
            ("2024-05-11 16:00:01-08", (at, 0.0)),
            ("2024-05-12 05:30:01 +05:30", (at, 0.0)),
            (" 2024-05-11T23:59:59.9z ", (at - 2, 0.9)),
            ("2024-03-10 02:30:00", (1_710_037_800, 0.0)),  # an hour that Los Angeles does not have
        ):
            assert stamp(text) == right, text
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "value",
    ["", "noon", "2024-05-12", "12/05/2024 00:00", "2024-05-12 25:00:00", "2024-13-01 00:00:00", "1715472001", None,
     "2024-05-12 00:00:01.", "2024-05-12 00:00:01+99:99", "2024-05-12 00:00:01.5 CEST", "0001-01-01 00:00:00+10:00"],
)  # fmt: skip
def test_what_is_no_moment_is_refused(value):
    with pytest.raises(ValueError, match=r"is not a time; write it as 2024-05-12 00:00:01\.5, or with a zone"):
        stamp(value)


def rows(tmp_path, text):
    file = tmp_path / "t.csv"
    file.write_text(text, encoding="utf-8", newline="")
    return list(csv_rows(file, ("Kind", "Size")))


def test_rows_are_found_whatever_the_header_looks_like(tmp_path):
    right = [(2, {"Kind": "a", "Size": "1"}), (4, {"Kind": "b", "Size": "2"})]
    assert rows(tmp_path, "Kind,Size\na,1\n\nb,2\n") == right
    assert rows(tmp_path, "\ufeffkind, SIZE \r\na,1\r\n,\r\nb,2\r\n\r\n") == right
    assert rows(tmp_path, "Size,Kind,more\n1,a,x\n") == [(2, {"Size": "1", "Kind": "a", "more": "x"})]
    assert rows(tmp_path, 'Kind,Size\n"a\u2028,b",1\n') == [(2, {"Kind": "a\u2028,b", "Size": "1"})]
    assert rows(tmp_path, "Kind,Size\n") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"line 1 has columns \[\]; needed are Kind, Size, each once, between commas"),
        ("Kind\na\n", r"line 1 has columns \['Kind'\]"),
        ("Kind;Size\na;1\n", r"line 1 has columns \['Kind;Size'\]"),
        ("Kind,Size,kind\na,1,b\n", "each once"),
        ("Kind,Size\na,1\nb,1,024\n", r"line 3 has 3 values for 2 columns: \['b', '1', '024'\]; write numbers without"),
        ('Kind,Size\n"a,1\n', r"is not CSV \(unexpected end of data\); correct it"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        rows(tmp_path, text)


def test_counts_of_json_are_read_alike():
    for text, right in (("12", 12), ("12.0", 12), ("1e3", 1000), ('"12"', 12)):
        assert tokens(json.loads(text)) == right
