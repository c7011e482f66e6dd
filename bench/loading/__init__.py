"""How other people's weights are loaded: the command ``python -m bench.loading``."""
