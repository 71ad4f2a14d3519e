"""Process groups, the layer classes a model is built from, and the pieces its parameters consist of."""
