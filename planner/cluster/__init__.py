"""The hardware of a cluster, and the seconds that computation and communication take on it.

    spec.py          the fields of a cluster file; presets/ holds files of known clusters
    cost.py          `Cost`: converts work and transfers to seconds
    compute.py       seconds of computation on a device (roofline), or on cores that CPU ranks share
    ports.py         which ports messages between ranks pass, and the seconds that they occupy each
    places.py        which ranks share a server, an island, a PCIe switch or a NIC; the network
                     between servers
    all_reduce.py    algorithms of an all-reduce, and the seconds that it occupies each port
    placement.py     proposals of which GPU each rank sits on
    link_fit.py      fits a link to timed messages
    clouds.py        servers by the names of their cloud instance types
    readings.py      reads a cluster from the output of nccl-tests and nvidia-smi
    local_gpus.py    reads this machine's GPUs
    scaling.py       multiplies some numbers of a cluster
    doubt.py         how far each constant may be off, and clusters drawn from these ranges

This room imports planner/vocabulary only."""
