"""A plan and its runs as one HTML page that opens offline.

picture.py     what a picture is, and what all share: colours, units, sizes
facts.py       what is drawn: the plan predicted and played again, its runs
decision.py    pictures of the choice: epochs, memory
timeline.py    what each rank does when, simulated and measured
traffic.py     who sends whom, and over which links
outcome.py     pictures of runs: errors by operation, losses
page.py        `report`: the pictures in page.html
"""

from gnnplan.report.page import report

__all__ = ["report"]
