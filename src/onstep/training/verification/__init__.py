"""Checks that ranks and runs compute the same thing.

`trajectory_hash.TrajectoryHash` proves a resumed run equal to the uninterrupted one, `weight_hash.WeightHashes`
compares the replicas' weights.
"""
