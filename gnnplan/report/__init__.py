"""A plan and its runs as one HTML page that opens offline.

picture.py     the class of a picture; the colours, units and sizes of all pictures; their input:
               the plan, predicted and simulated again, and its runs
decision.py    pictures of the plan's choice: the parts of an epoch, memory; and of its runs: errors
               per operation, losses
timeline.py    the operations of each rank over time, simulated and measured
traffic.py     bytes between ranks, and the load of links
page.py        `report`: writes the pictures into page.html
"""

from gnnplan.report.page import report

__all__ = ["report"]
