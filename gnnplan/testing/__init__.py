"""The tests that every strategy must pass; a package with its own strategy runs them too
(docs/how-to/extend.md).

    kit.py        the tests that a package imports, and the names that it defines for them
    drawing.py    a schedule drawn as text, as on the strategies' pages
    laws.py       checks of planner and simulator: closed form, schedule, bytes, memory
    runs.py       checks of real runs: order, bytes, memory, resume, exactness
    plain.py      reference models and training without the executor, to write a recursion with
    ranks.py      real ranks over Gloo, and the cases that they train
    fixtures.py   pytest fixtures: ranks, and small awkward graphs

They need gnnplan[testing]. gnnplan's own tests use the same files.
"""

import pytest

pytest.register_assert_rewrite(*(f"gnnplan.testing.{name}" for name in ("kit", "laws", "runs")))
