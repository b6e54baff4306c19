"""`onstep checkpoint list|verify|diff|export`: `group.app` has the commands, a module each."""
