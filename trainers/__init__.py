"""Training of GPT and BERT models: the commands, and the parts that they are made of."""
