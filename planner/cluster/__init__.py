"""The hardware of a cluster, and the seconds that computation and communication take on it.

    spec.py          the fields of a cluster file; presets/ holds files of known clusters
    cost.py          `Cost`: converts work and transfers to seconds; algorithms of an all-reduce
    compute.py       seconds of computation on a device (roofline), or on cores that CPU ranks share
    ports.py         which ports messages between ranks pass, and the seconds that they occupy each
    places.py        which ranks share a server, an island, a PCIe switch or a NIC; the network
                     between servers
    placement.py     proposals of which GPU each rank sits on
    readings.py      fits links to timed messages; reads a cluster from the output of nccl-tests and
                     nvidia-smi
    machines.py      servers of clouds by their instance types, and this machine's GPUs
    scaling.py       multiplies some numbers of a cluster; how far each constant may be off, and
                     clusters drawn from these ranges

This room imports planner/vocabulary only."""
