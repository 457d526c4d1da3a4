"""Types and helpers that all packages of the planner, the simulator and the executor use.

    schedule.py   tasks, their work and their dependencies
    trace.py      spans recorded or simulated, and trace files for Perfetto and Holistic Trace
                  Analysis
    errors.py     errors that a user sees, and their exit codes
    units.py      quantities with units as text: '25GB/s'
    text.py       tables, and strategies with knobs as text: 'gnnpipe(stages=4)'
    spec.py       the base class of specifications, and the types of their fields
    numbers.py    numbers that may be arrays, their formats (the values of --dtype), values with
                  array fields, rank-to-rank matrices
    files.py      safe reading and writing of files
    progress.py   notes and progress on standard error

This package imports no other package of gnnplan."""
