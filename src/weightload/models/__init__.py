"""Whole models: transformers on the fast route, and modules moved through the ring.

weightload brings the bytes; placing, renaming, fusing and tying stay transformers'
work, done by its public `from_pretrained`. The functions are reached as
`weightload.load_model` and so on, which is also when torch and transformers come in.
"""
