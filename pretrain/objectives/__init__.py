"""What the model is asked to predict: masked tokens (token, whole word, span) and sentence order."""
