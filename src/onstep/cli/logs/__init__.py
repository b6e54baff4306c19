"""`onstep logs list|summary|tail|plot|compare|report|replay`: `group.app` has the commands, a module each."""
