"""The functions behind `import gnnplan`: one file per function, each with its result's class.

defaults.py    the default graph
arguments.py   check the types of a function's arguments
asking.py      a graph, a GNN and a cluster, in any form that a user has them -> Problem
checking.py    check() -> Check
planning.py    plan() -> Plan
scaling.py     scale() -> Scale
simulation.py  Plan.simulate() -> Simulation, Plan.sweep() -> Sweep
running.py     Plan.run() -> Run
tuning.py      tune() -> Tuned
validation.py  validate() -> Validation, Validations
measuring.py   measure() -> Cluster
view.py        print a result as text and as HTML

The command line prints these objects.
"""
