"""Plays schedules in virtual time, with SimPy. Holds no strategy code.

    player.py    plays a schedule: `play`, and its upper bound `serial`
    network.py   transfers that overlap share ports by max-min fairness
    flows.py     the same for single messages, which network.py bundles
    noise.py     jitter and stragglers
    replay.py    a finished run beside its plan: predicted again, played, compared

The simulator imports planner/vocabulary and planner/cluster only."""
