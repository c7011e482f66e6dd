"""What can be trained: a module for each task, with its settings, model, objective and batches."""
