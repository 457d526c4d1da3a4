"""Ranks: process groups, communication, optimizer, memory and checkpoints of one rank.

    rank.py         `Rank`: its number, device and process groups; work that overlaps a step; how a
                    process becomes a rank, and ends
    recorder.py     spans of a rank's operations, bytes that it sends; a CUDA device's clock
    rendezvous.py   the launcher's environment, and the store where ranks meet
    near.py         exchanges between ranks on one machine, through memory
    comm.py         exchanges of rows, point-to-point messages, all-reduces
    gather.py       small values of all ranks
    learner.py      all-reduce of gradients; SGD, Adam and AdamW; the whole model's weights,
                    independent of ranks; the best weights
    checkpoint.py   files from which a training resumes
    machine.py      devices and limits of this machine, and the memory that a rank allocates
    activity.py     the file that names a rank's current operation

This room imports the planner and executor/layers."""
