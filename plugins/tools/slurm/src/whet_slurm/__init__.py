"""A run in a Slurm job saves and ends before the time limit of the job."""
