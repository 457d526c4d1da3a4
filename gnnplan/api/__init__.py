"""The functions behind `import gnnplan`: one file per function, each with its result's class.

arguments.py   check the types of a function's arguments; a graph, a GNN and a cluster, in any form
               that a user has them -> Problem
planning.py    plan() -> Plan
scaling.py     scale() -> Scale
simulation.py  Plan.simulate() -> Simulation, Plan.sweep() -> Sweep
running.py     Plan.run() -> Run, check() -> Check, measure() -> Cluster
tuning.py      tune() -> Tuned
validation.py  validate() -> Validation, Validations
view.py        print a result as text and as HTML

The command line prints these objects. --help shows the default graph, so this file imports nothing.
"""

DEFAULT_GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
