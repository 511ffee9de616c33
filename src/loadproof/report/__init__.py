"""What a person keeps: the receipt, and pages to read it by."""
