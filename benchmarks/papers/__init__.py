"""Predictions of printed figures of other people's systems, whose code differs from gnnplan's.

`gnnplan validate --published` uses this package, so it is installed, as gnnplan.papers. Plans do
not use it.

published.py       reads and checks the file, and predicts all its figures: errors, and whether the
                   faster strategy is right
question.py        Question: the problem, strategy and row behind a figure; element-wise work of
                   other people's code
figures.py         a row -> its question (graph, GNN, testbed, strategy) -> its figure
calibrate.py       fits constants of the testbeds to some of the figures
full_graph.py      differences of PipeGCN's and GraNNDis' code, and its memory
their_software.py  differences of DGL, PyG, PGL, SALIENT and SGNN
mini_batch.py      counts and times as P3 and GSplit define them
"""
