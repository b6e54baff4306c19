"""A run whose files are in an object store: it works in a local directory, which is mirrored there.

`attach` acquires the run's lease and fetches what an empty machine lacks; `Mirror` uploads what is committed locally,
in threads of its own, and says in an `outage` what is due; `remote_checkpoints` names, lists, writes, reads and deletes
checkpoints in the store, `run_files` everything else of a run.
"""
