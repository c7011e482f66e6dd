"""Training of GPT models: the commands, and the parts that they are made of."""
