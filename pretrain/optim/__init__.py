"""LAMB and learning-rate schedules."""
