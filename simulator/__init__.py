"""A discrete-event simulator of schedules, built on SimPy. It has no code of single strategies.

    player.py    simulates a schedule (`play`); an upper bound of its duration (`serial_s`)
    network.py   transfers that overlap share ports by max-min fairness; the same for the single
                 messages that are otherwise treated as one bundle
    noise.py     jitter and stragglers
    replay.py    predicts and simulates the plan of a finished run, and compares with the run

The simulator imports planner/vocabulary and planner/cluster only; replay.py also imports
planner/decision, planner/evidence and planner/problem."""
