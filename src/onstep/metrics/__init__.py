"""What is measured while training, and how it is shown."""
