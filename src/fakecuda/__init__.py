"""fakecuda: a recording fake CUDA driver that finds races on a machine without a GPU."""
