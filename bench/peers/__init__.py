"""What we are measured against, on torch.distributed: the only folder that imports it."""
