"""Printed figures of other people's systems, and what their code does differently from ours.

`gnnplan validate --published` answers by it, so it is installed, as gnnplan.papers. No plan reads
it.

published.py     all figures of a file: errors, and whether the faster strategy is named
rows.py          reads and checks the file
question.py      what a row asks of the model
interpret.py     a row -> its question: graph, GNN, testbed, strategy
figures.py       a question -> its figure
calibrate.py     constants of the testbeds, fitted to some figures
full_graph.py    what PipeGCN's and GraNNDis' code does differently
their_memory.py  what it keeps
their_passes.py  the element-wise work of other people's code
their_software.py  what DGL, PyG, PGL, SALIENT and SGNN do differently
mini_batch.py    what P3 and GSplit count and time
"""
