"""What needs hardware: measurements, hardware tests, policies and the receipts that landed."""
