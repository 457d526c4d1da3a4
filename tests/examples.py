"""How many examples hypothesis tries: a fifth of what a test asks for; at night all, new ones."""

import os

from hypothesis import strategies as st

NIGHT = "GNNPLAN_NIGHT" in os.environ  # set by `make nightly`
BY_DAY = 'aZ09 é\u2028😀"\\\n\0'


def examples(most: int) -> int:
    return most if NIGHT else -(-most // 5)


def text(most: int) -> st.SearchStrategy[str]:
    """By day of few characters: the table of all of them takes seconds to make."""
    return st.text(st.characters(codec="utf-8") if NIGHT else BY_DAY, max_size=most)
