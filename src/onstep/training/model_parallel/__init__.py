"""Features for models whose parts are on several ranks by other means than Onstep's, such as Megatron-Core."""
