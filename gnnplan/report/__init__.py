"""A plan and its runs as one HTML page that opens offline.

picture.py     the class of a picture, and the colours, units and sizes of all pictures
facts.py       the input of all pictures: the plan, predicted and simulated again, and its runs
decision.py    pictures of the plan's choice: the parts of an epoch, memory
timeline.py    the operations of each rank over time, simulated and measured
traffic.py     bytes between ranks, and the load of links
outcome.py     pictures of runs: errors per operation, losses
page.py        `report`: writes the pictures into page.html
"""

from gnnplan.report.page import report

__all__ = ["report"]
