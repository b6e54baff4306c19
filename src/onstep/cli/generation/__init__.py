"""`onstep generate` and `onstep chat`, and the models that they open (`trained`)."""
