"""What every room of the planner, the simulator and the executor uses.

    schedule.py   tasks, their work, and what they wait for
    trace.py      what happened when: spans, and the files that Perfetto opens
    hta.py        the same for Holistic Trace Analysis
    errors.py     errors that a user sees, and their exit codes
    units.py      quantities as people write them: '25GB/s'
    knobs.py      knobs of strategies as people write them: 'gnnpipe(stages=4)'
    table.py      tables of text
    spec.py       the base of specifications, and the types of their fields
    numbers.py    numbers that may be arrays of candidates
    precision.py  how the numbers of rows are held: what --dtype names
    values.py     values that hold arrays: equal where their numbers are
    outer.py      what all ranks send each other, by a number per sender and one per receiver
    files.py      reading and writing files safely
    progress.py   lines for people who wait

This room imports no other."""
