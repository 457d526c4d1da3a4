"""The face of `import gnnplan`: a file per question, its answer as an object.

defaults.py    the graph where none is named
asking.py      a graph, a GNN and a cluster, in any form a user has them -> Problem
checking.py    check() -> Check
planning.py    plan() -> Plan
scaling.py     scale() -> Scale
simulation.py  Plan.simulate() -> Simulation, Plan.sweep() -> Sweep
running.py     Plan.run() -> Run
tuning.py      tune() -> Tuned
validation.py  validate() -> Validation, Validations
measuring.py   measure() -> Cluster
view.py        how answers show themselves, as text and HTML

The command line prints these objects.
"""
