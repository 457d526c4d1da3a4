"""Starts the ranks of a plan, watches them, and says which one failed and why.

Which file to open:

    launcher.py       starts local ranks and waits for them; the names that the command line uses
    agent.py          local ranks under torch's elastic agent; whether any still does anything
    emulation.py      network namespaces that play servers
    asked.py          a plan that is to be run, and how; what is refused of it and of its folder
    preflight.py      what the plan asks for beside what this machine has: a table
    rank_process.py   one rank's process, from its plan to its exit code
    peers.py          what ranks tell each other before they train, and of a failure
    failure.py        how a rank fails, in its own words, and which failed first
    tune.py           runs the few strategies that are within doubt, and plans by what they took
    check.py          what strategies make of a model's gradients, on a small graph

This room may import all rooms of the executor except measure/.
"""
