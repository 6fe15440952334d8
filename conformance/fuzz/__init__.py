"""Property fuzzing of paged KV cache bookkeeping: models, laws, a random driver, state machines.

`python -m conformance.fuzz` is the command; `conformance.fuzz.machines` and `strategies` are for
Hypothesis; `conformance.contracts` is what an adapter has to offer.
"""
