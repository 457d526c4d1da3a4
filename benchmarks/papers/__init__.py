"""Predictions of printed figures of other people's systems, whose code differs from gnnplan's.

`gnnplan validate --published` uses this package, so it is installed, as gnnplan.papers. Plans do
not use it.

published.py     predicts all figures of a file: errors, and whether the faster strategy is right
rows.py          reads and checks the file
question.py      Question: the problem, strategy and row behind a figure
interpret.py     a row -> its question: graph, GNN, testbed, strategy
figures.py       a question -> its figure
calibrate.py     fits constants of the testbeds to some of the figures
full_graph.py    differences of PipeGCN's and GraNNDis' code
their_memory.py  memory of PipeGCN's and GraNNDis' code
their_passes.py  element-wise work of other people's code
their_software.py  differences of DGL, PyG, PGL, SALIENT and SGNN
mini_batch.py    counts and times as P3 and GSplit define them
"""
