"""The tests, by package of Onstep; what they share is in `tests.support`."""
