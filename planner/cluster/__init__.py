"""A cluster: what it is made of, and the seconds that work and transfers take on it.

    spec.py          the fields of a cluster file; presets/ holds clusters that are known
    cost.py          `Cost`: work and transfers become seconds
    compute.py       how long a device computes
    shared_cores.py  ranks on a CPU that share the cores of their machine
    transfer.py      what a transfer is: a latency, and seconds of ports
    ports.py         which ports messages pass; messages.py: where their ends sit
    places.py        who shares a server, an island, a PCIe switch, a NIC
    fabric.py        what lies between servers
    all_reduce.py    what an all-reduce keeps busy
    collectives.py   the algorithms of an all-reduce
    placement.py     which GPU each rank sits on
    link_fit.py      from timed messages to a link
    clouds.py        servers by the names that clouds rent them under
    readings.py      from the files of nccl-tests and nvidia-smi to a cluster
    here.py          this machine's GPUs
    scaling.py       a cluster with some of its numbers multiplied
    doubt.py         how far its constants may be off, and clusters drawn from that

This room imports planner/vocabulary only."""
