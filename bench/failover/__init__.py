"""What deaths cost an answer: ``python -m bench.failover PART``.

Everything is real: nodes are processes, three spans with two replicas each, and deaths are ``kill -9`` of a node with
all it started. Each part is a module here and leaves a record of its own:

- ``deaths``: tokens per second with 0, 1 and 3 deaths in an answer, against a client that begins again
- ``pause``: the pause after a death, taken apart
- ``long``: a death at 8k tokens of context, with replay and with standby
- ``rates``: throughput when hops die at random

Deaths come at drawn places of the answer (``plan``), never at times. Both contenders use the same client library:
one lets its sessions last, the other takes bare chains and, when one fails, opens another and sends its prompt again.
"""
