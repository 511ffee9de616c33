"""The device's side: the driver's seam, the ring of slots, and the memory that tensors live in."""
