"""Training on top of tplayers: the commands, and the parts that they are made of."""
