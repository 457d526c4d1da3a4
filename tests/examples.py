"""How many examples hypothesis tries: a fifth of what a test asks for, all of them at night, which
are new ones each time (conftest.py)."""

import os

NIGHT = "GNNPLAN_NIGHT" in os.environ  # set by `make nightly`


def examples(most: int) -> int:
    return most if NIGHT else -(-most // 5)
