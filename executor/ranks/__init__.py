"""One rank among others: its process groups, exchanges, optimizer, memory and checkpoints.

Open
    rank.py         for `Rank`: its place, device and process groups, and these two:
    lanes.py        for what it does beside its step, in threads or streams
    recorder.py     for spans of its operations, and bytes that it sends
    opening.py      for how a process becomes a rank, and ends
    meeting.py      for what a launcher says, the store where ranks meet, and who reaches it
    comm.py         for exchanges of rows, point-to-point messages, all-reduce and small messages
    learner.py      for gradients summed over ranks, and SGD, Adam and AdamW
    checkpoint.py   for what a rank stores to go on from later
    whole.py        for what a training has learned, whatever its ranks; and its best weights
    machine.py      for what this machine is and lets a user start, and how much memory a rank fills
    device_clock.py for when a CUDA device begins and ends a rank's work
    replay.py       for a step whose kernels are launched together
    activity.py     for the file that says which operation a rank is in

It imports the planner and executor/layers."""
