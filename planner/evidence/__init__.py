"""How wrong the predictions are, compared with our own runs.

    recorded.py    what a finished run left in its folder
    validate.py    one run: predicted, simulated and measured, and a diagnosis
    runs.py        many runs: errors, rankings of strategies, and a refit of the cluster's constants
    halving.py     which of a few strategies is fastest, from short runs within a budget
    accuracy.py    what runs showed of accuracy over epochs

May import every room of the planner: this is the last one.
"""
