"""The launcher: starts the ranks of a plan, watches them, and reports which rank failed and why.

Which file to open:

    launcher.py       starts local ranks and waits for them
    agent.py          runs local ranks under torch's elastic agent, and detects that all hang
    emulation.py      emulates servers by network namespaces
    run_request.py    a plan with its run options, and the checks of both and of the run's folder
    preflight.py      compares what the plan requires with this machine, as a table
    rank_process.py   the process of one rank, from its plan to its exit code; what ranks agree on
    failure.py        describes how a rank fails, and finds the rank that failed first
    tune.py           runs the few strategies that are within doubt, and plans by the results
    check.py          compares the gradients of all strategies with one process, on a small graph

This package may import all packages of the executor except measure/.
"""
