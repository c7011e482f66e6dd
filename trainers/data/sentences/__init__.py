"""Samples of sentences for BERT: which sentences stand together, and which words are masked."""
