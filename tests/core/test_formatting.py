"""Bytes and tables, for people."""

from torchremat.core.formatting import human_bytes, table


def test_human_bytes():
    given = [0, 1023, 1024, 10 * 1024, 102400, 1023 * 1024, 1 << 20, 3 << 30, 5 << 50]
    assert [human_bytes(n) for n in given] == [
        "0 B", "1023 B", "1.00 KiB", "10.0 KiB", "100 KiB", "1.00 MiB", "1.00 MiB", "3.00 GiB",
        "5120 TiB",
    ]  # fmt: skip
    assert human_bytes(-2048) == "-2.00 KiB"


def test_tables_leave_out_empty_columns():
    assert table([("1", "", "a"), ("22", "", "b")], numeric=(0,)) == ["   1  a", "  22  b"]
    assert table([], numeric=()) == []
