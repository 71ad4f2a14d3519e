"""Starts data_prep and pretrain on clusters: SLURM, launchers, planning."""
