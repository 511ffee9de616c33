"""What was seen: fresh processes that load once, and what they and their parent measured."""
