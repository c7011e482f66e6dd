"""Text that continues text: prompts from files, the model's tokens as text, and a conversation with it."""
