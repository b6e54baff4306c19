"""`onstep checkpoint list|verify|diff|export`: `group` declares the commands, the other modules do their work."""
