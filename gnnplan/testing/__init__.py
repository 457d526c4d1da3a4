"""The tests that every strategy passes, for a package to run on its own (docs/how-to/extend.md).

    kit.py        the tests that a package imports, and what it says for them
    drawing.py    a schedule as text, as on strategies' pages
    laws.py       of what the planner and the simulator say: closed form, schedule, bytes, memory
    runs.py       of what ranks do: order, bytes, memory, resume, exactness
    plain.py      models and their training written plainly, to write a recursion with
    ranks.py      real ranks over Gloo, and the cases that they train
    fixtures.py   ranks and small awkward graphs

It needs gnnplan[testing]. Our own tests use the same.
"""

import pytest

pytest.register_assert_rewrite(*(f"gnnplan.testing.{name}" for name in ("kit", "laws", "runs")))
