"""Keys and globs."""

import pytest

from ipu_log_callback.errors import KeySelectionError
from ipu_log_callback.selection import Selection, parse_names


@pytest.mark.parametrize(
    ("pattern", "name", "selected"),
    [
        ("train_loss", "train_loss", True),
        ("train_loss", "Train_loss", False),
        ("val_*", "val_acc/dataset", True),
        ("val_?", "val_10", False),
        ("*", "", True),
        ("a[0]", "a[0]", True),
        ("a[0]", "a0", True),
        ("loss (ü)", "loss (ü)", True),
    ],
)
def test_a_pattern_selects_its_equal_and_what_it_matches_as_a_glob(pattern, name, selected):
    """A name is selected by the pattern that equals it, whatever its characters, and by globs."""
    assert Selection([pattern]).selects(name) is selected


def test_patterns_that_selected_nothing_come_with_the_nearest_names():
    """A typo is answered with what was logged instead."""
    selection = Selection(["train_lss", "val_*"])
    for name in ("train_loss", "val_acc", "epoch"):
        selection.selects(name)
    assert selection.unmatched() == [("train_lss", ["train_loss"])]


def test_one_str_is_one_name():
    """A str is not taken for a sequence of its characters."""
    assert parse_names("abc", "keys") == ("abc",)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (3, "received int, expected a str or a sequence of str"),
        ({"a": 1}, "received dict"),
        (["a", ""], "received '' at position 1"),
        ("  ", "received '  ' at position 0"),
        (["a", 1], "received 1 at position 1"),
        (["a", "b", "a"], "received 'a' twice"),
    ],
)
def test_a_name_that_cannot_be_meant_is_refused(names, told):
    """The message names the argument, what came and what to type."""
    with pytest.raises(KeySelectionError) as error:
        parse_names(names, "keys")
    assert told in str(error.value)
    assert "IPULogCallback(keys=" in str(error.value)
    assert "fix" in str(error.value)
