"""`goldenppo audit`: recomputes a real training step from its dumped tensors.

edges.py says what leads to what, dump.py and step.py read files and bring them into one layout, engine.py judges (rows.py and
losses.py where a dump is large, micro.py for micro-batches), infer.py reads parameters from the numbers, tracked.py carries
error bounds through the reference, recorder.py writes dumps.
"""
