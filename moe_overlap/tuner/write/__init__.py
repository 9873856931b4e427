"""A chosen plan as files: flags, a Slurm script."""
