"""`onstep logs list|summary|tail|plot|compare|report|replay`: `group` imports the module of a command on first use."""
