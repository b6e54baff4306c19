"""What is documented, as tables, and what the contract suites compare: every callback, both doors."""
