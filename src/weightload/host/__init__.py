"""The host's side: files and pages. Everything here goes through one seam, `System`."""
