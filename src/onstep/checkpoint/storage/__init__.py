"""Brings a checkpoint to disk: `transaction` commits it with one rename, `store` writes and syncs, `manifest` has
every file's size and hash, `memory_copies` lets training continue during a save.
"""
