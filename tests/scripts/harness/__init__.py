"""Makes the inputs of the scripts, runs a script under both libraries, and compares what they leave behind."""
