"""Simulates time (`clock`), lines (`network`), what runs on both (`tasks`), and failures and outages (`churn`)."""
