"""Columns line up, whatever stands in them."""

from mlaforge.rendering.table import markdown_table, text_table


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [("name", "", "n"), ("a", "x", "100"), ("longer", "", "7")]
    assert text_table(rows).splitlines() == ["name       n", "a       x  100", "longer     7"]
    assert text_table(rows, "<>").splitlines() == ["name         n", "a       x  100", "longer       7"]
    assert text_table(rows, ">").splitlines() == ["  name       n", "     a  x  100", "longer       7"]


def test_a_shorter_row_goes_on_beyond_its_column():
    rows = [("name", "what", "n"), ("a", "far more than fits"), ("b", "c", "1")]
    assert text_table(rows).splitlines() == ["name  what  n", "a     far more than fits", "b     c     1"]


def test_a_column_may_be_empty_and_a_line_ends_without_spaces():
    assert text_table([("a", ""), ("b", "")]).splitlines() == ["a", "b"]
    assert text_table([("", "a")]) == "  a"


def test_markdown_keeps_a_cell_whole():
    assert markdown_table([("a", "b"), (1, "x|y")]).splitlines() == ["| a | b |", "|---|---|", "| 1 | x\\|y |"]
