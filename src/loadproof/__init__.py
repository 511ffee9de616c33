"""loadproof: compare two loaders on one checkpoint and write a receipt."""
