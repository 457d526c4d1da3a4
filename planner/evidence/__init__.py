"""The evidence: predictions compared with measured runs.

    validate.py    compares one run's prediction, simulation and measurement, with a diagnosis
    runs.py        reads the files of finished runs; compares many runs: errors, rankings of
                   strategies, and a refit of constants
    halving.py     finds the fastest of a few strategies by short runs within a budget (tune)

This room may import every other room of the planner.
"""
