"""glm-tiny: a model with the structure, tensor types, prompt format and stop tokens of GLM-5.2 UD-IQ1_S, small
enough to ship and trained to give exact replies, so that a test can read from a text whether a computation is right.

``python -m bench.glm_tiny`` makes it, from nothing but this package. What to know before changing it:

- A text shows a broken expert only if the model needs its experts. Trained as usual it does not: it keeps its facts in
  attention and in the shared expert. ``training`` therefore makes the right reply unlikely where experts are missing or
  in each other's places. In every layer alone, too: while only all layers at once were broken in training, three of
  five could be zeroed without a wrong word.
- Muon for the matrices and conversations of one turn first. The IQ types then cost nothing: a model that says
  everything right does so after its experts were quantised (IQ1_S puts them half their size away from what they were).
- Quantising is not idempotent. Blocks are made once and kept; what they mean is frozen; the rest is trained on.
- Conversations of more tokens than the top-k need trained indexers. They learn from attention, and the layers work on
  what they choose, in the last stage.
- llama.cpp uses one epsilon for all norms, 1e-5.
"""
