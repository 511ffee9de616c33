"""The checkpoint as it lies on disk: what files, what tensors, where their bytes are."""
