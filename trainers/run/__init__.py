"""The run around the steps: evaluation, metrics, report."""
