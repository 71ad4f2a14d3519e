"""A recipe as a chain of SLURM jobs: what they are, their scripts, and talking to the scheduler."""
