"""Starts the ranks of a plan, watches them, and says which one failed and why.

Which file to open:

    launcher.py       starts local ranks and waits for them; the names that the command line uses
    tune.py           runs the few strategies that are within doubt, and plans by what they took
    turns.py          runs beside each other that train in turns, for tune.py
    check.py          what strategies make of a model's gradients, on a small graph
    options.py        how a plan is run: epochs, timeout, checkpoints
    checks.py         what is refused of a run's input: the plan's problem, options, folder
    preflight.py      what the plan asks for beside what this machine has: a table
    rank_process.py   one rank's process, from its plan to its exit code
    together.py       ranks of torchrun and srun tell each other what they refuse
    agreement.py      what all ranks compare once they have met
    agent.py          local ranks under torch's elastic agent
    emulation.py      local ranks in network namespaces that play servers
    heartbeat.py      whether any rank still does anything
    blame.py          which rank failed first, from exit codes and notes
    roll_call.py      the same under torchrun or srun, where no launcher of ours watches
    scalars.py        a run's metrics for TensorBoard
    scratch.py        a folder for what killed processes leave lying about
    out_of_memory.py  what to say when memory runs out

This room may import all rooms of the executor except measure/.
"""
