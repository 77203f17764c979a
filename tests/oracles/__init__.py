"""Numbers from other projects' tests: facts to agree with, one file for each project, which its docstring names.

Carried over are the numbers alone. Where a project has a feature that regard says in another way, the test says it
regard's way: an offset is added by hand, a mask over queries is a mask over pairs.

What waits for the features that it belongs to, and has no test here yet:

- positions: CTranslate2's relative positions;
- biases: ALiBi slopes of CTranslate2 and keras-hub;
- masks: ONNX's window, once there is `masks.window` (here it is written out as booleans);
- layers: the projections of Keras's multi-head attention.

AllenNLP's cosine score is not one of regard's six.
"""
