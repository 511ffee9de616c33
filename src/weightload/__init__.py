"""weightload: safetensors from disk into device tensors, with a small footprint.

Importing this package loads neither torch nor transformers nor a CUDA binding;
each comes in where it is first needed.
"""
