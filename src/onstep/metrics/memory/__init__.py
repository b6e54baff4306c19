"""Memory of training: estimated by kind from a configuration, compared with the device, and what would reduce it."""
