"""What a checkpoint costs a training run: the command ``python -m bench.saving``."""
