"""The log-likelihood of text: the windows in which it is read, perplexities by token and by word, last words."""
