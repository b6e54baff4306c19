"""Reads what SLURM tells a process: its rank in an `srun` step, its allocation, and when that ends."""
