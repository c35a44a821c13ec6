"""Prefill/decode disaggregation: what the two legs of a request are, as values.

A prefill worker computes the KV cache of the prompt, a decode worker fetches it and generates. Nothing
here sends anything: the functions turn the client's body, and the prefill worker's answer, into the
body and request id of the next leg.
"""
