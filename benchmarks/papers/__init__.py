"""Predictions of printed figures of other people's systems, whose code differs from gnnplan's.

`gnnplan validate --published` uses this package, so it is installed, as gnnplan.papers. Plans do
not use it.

published.py     predicts all figures of a file: errors, and whether the faster strategy is right
question.py      reads and checks the file; Question: the problem, strategy and row behind a figure
interpret.py     a row -> its question: graph, GNN, testbed, strategy
figures.py       a question -> its figure
calibrate.py     fits constants of the testbeds to some of the figures
full_graph.py    differences of PipeGCN's and GraNNDis' code, and its memory
their_software.py  differences of DGL, PyG, PGL, SALIENT and SGNN; element-wise work of other
                 people's code
mini_batch.py    counts and times as P3 and GSplit define them
"""
