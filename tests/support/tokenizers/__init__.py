"""Folders of tokenizers as the hub has them, drawn, and compared with transformers."""
