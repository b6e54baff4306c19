"""The command line over the functional door."""
