"""P3: layer 1 on feature columns, the other layers data parallel, on mini-batches.

p3.py           the strategy: what it does (with the drawing), and a batch's operations
slices.py       knobs; which rank has which feature columns, and who adds up partial rows with whom
periods.py      the order of the pipeline
memory.py       bytes that a rank holds, and what a batch's operations do to them
break_even.py   up to which width it sends less than fetching features, in a sentence
"""
