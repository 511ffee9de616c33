"""The entry points, by subject; each module holds one subject's calls."""
